"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from garnish.client import Client

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoHeader = Annotated[bool, typer.Option("--no-header", help="Leave out the table's header line.")]
Warm = Annotated[bool, typer.Option("--warm", help="First bring it to a node; calls get it a minute later at most.")]
File = Annotated[Path, typer.Option("-f", "--file", help="The service file.")]
State = Annotated[Path, typer.Option("--state", help="Directory of registry, keys and logs.")]
Url = Annotated[str | None, typer.Option("--url", help="The service's address (default: GARNISH_URL, or the state's).")]
HostNodes = Annotated[
    int | None, typer.Option("--host-nodes", min=1, max=64, help="Nodes that divide this host's cores, it included.")
]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Act for this tenant.")]

DEFAULT_FILE = Path("serverless.yml")
DEFAULT_STATE = Path(".garnish")


def open_client(url: str | None, state: Path, tenant: str | None = None, *, admin: bool = False) -> Client:
    """A client with the key that belongs to the service, or with its admin key. No option takes a key: it would show in
    the process list."""
    from garnish.client import Client
    from garnish.connection import find_connection

    return Client(connection=find_connection(url, None, os.environ, state=state, tenant=tenant, admin=admin))
