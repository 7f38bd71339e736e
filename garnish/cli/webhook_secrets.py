"""`garnish webhook-secrets`: what a tenant's webhooks are signed with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from garnish.cli.options import DEFAULT_STATE, AsJson, NoHeader, State, Url, open_client

TenantName = Annotated[str, typer.Argument(help="The tenant.", metavar="TENANT")]

commands = typer.Typer(
    name="webhook-secrets",
    help="Secrets that a tenant's webhooks are signed with: create, list, delete. With the admin key.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    app.add_typer(commands)


@commands.command()
def create(tenant: TenantName, url: Url = None, state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """Make a secret and show it, this once. Two are valid at most, so that receivers can change to the new one."""
    from garnish.events import webhook_secret_call
    from garnish.screen import Screen
    from gateway.routes.webhook_secrets import NewSecretReply

    screen = Screen(as_json)
    with open_client(url, state, admin=True) as client:
        made = client.ask(webhook_secret_call(tenant), NewSecretReply)
    screen.line(made.secret)
    screen.note(f"its id is {made.secret_id}; it is not shown again")
    screen.result(made)


@commands.command("list")
def list_secrets(
    tenant: TenantName,
    url: Url = None,
    state: State = DEFAULT_STATE,
    no_header: NoHeader = False,
    as_json: AsJson = False,
) -> None:
    """List the ids of the valid secrets."""
    from garnish.events import webhook_secrets_call
    from garnish.screen import Screen
    from garnish.table import Column
    from gateway.routes.webhook_secrets import SecretsReply

    screen = Screen(as_json, header=not no_header)
    with open_client(url, state, admin=True) as client:
        found = client.ask(webhook_secrets_call(tenant), SecretsReply)
    made = [datetime.fromtimestamp(each.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for each in found.secrets]
    rows = [[each.secret_id, when] for each, when in zip(found.secrets, made, strict=True)]
    screen.table([Column("ID", least=16), Column("CREATED", least=20)], rows)
    screen.result(found)


@commands.command()
def delete(
    tenant: TenantName,
    secret_id: Annotated[str, typer.Argument(help="As `list` shows it.", metavar="ID")],
    url: Url = None,
    state: State = DEFAULT_STATE,
) -> None:
    """End a secret: webhooks are not signed with it any more."""
    from garnish.events import end_webhook_secret_call
    from garnish.screen import Screen

    with open_client(url, state, admin=True) as client:
        client.send(end_webhook_secret_call(tenant, secret_id))
    Screen().line(f"{secret_id} has ended")
