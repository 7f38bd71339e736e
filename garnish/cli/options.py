"""Options that several commands share, single or in groups, and the conversion of commands to those of Typer."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from garnish.errors import FrontDoorError
from garnish.screen import Screen

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

Command = Callable[..., None]


@dataclass(frozen=True)
class Service:
    """Options that choose the service.

    No option takes a key, since it would be visible in the process list.
    """

    url: Url = None
    state: State = DEFAULT_STATE

    def client(self, tenant: str | None = None, *, admin: bool = False) -> Client:
        """Returns a client for the tenant, with the service's key for that tenant.

        With `admin` the client has the service's admin key.
        """
        from garnish.client import Client
        from garnish.credentials import find_connection

        connection = find_connection(self.url, None, os.environ, state=self.state, tenant=tenant, admin=admin)
        return Client(connection=connection)


@dataclass(frozen=True)
class TenantService(Service):
    """Options that choose the service and one of its tenants."""

    tenant: Tenant = None


@dataclass(frozen=True)
class Output:
    """Options for the output of a command."""

    as_json: AsJson = False

    def screen(self) -> Screen:
        return Screen(self.as_json)


@dataclass(frozen=True)
class TableOutput:
    """Options for the output of a command that prints a table."""

    no_header: NoHeader = False
    as_json: AsJson = False

    def screen(self) -> Screen:
        return Screen(self.as_json, header=not self.no_header)


def ask(question: str, screen: Screen, nobody: str) -> None:
    """Asks the user whether to continue.

    Raises FrontDoorError with the text `nobody` if nobody can be asked. Raises typer.Exit if the answer is no.
    """
    if screen.as_json or not sys.stdin.isatty():
        raise FrontDoorError(nobody)
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def commands(members: Mapping[str, Command], **settings: Any) -> typer.Typer:
    """Returns a Typer application with the commands `members`, by name, and the `settings` of typer.Typer."""
    app = typer.Typer(**settings)
    for name, command in members.items():
        app.command(name)(flat(command))
    return app


def flat(command: Command) -> Command:
    """Returns the command with its option groups replaced by single parameters, which come last.

    An option group is a dataclass, and each of its fields becomes a parameter.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    plain = [each for each in parameters if each.name not in groups]
    options = [each for kind in groups.values() for each in inspect.signature(kind, eval_str=True).parameters.values()]

    @wraps(command)
    def run(**arguments: Any) -> None:
        for name, kind in groups.items():
            arguments[name] = kind(**{field.name: arguments.pop(field.name) for field in fields(kind)})
        command(**arguments)

    run.__signature__ = inspect.Signature([*plain, *options])  # type: ignore[attr-defined]
    return run
