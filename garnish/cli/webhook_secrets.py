"""`garnish webhook-secrets`: what a tenant's webhooks are signed with."""

from __future__ import annotations

from typing import Annotated

import typer

from garnish.cli.options import Output, Service, TableOutput, commands

TenantName = Annotated[str, typer.Argument(help="The tenant.", metavar="TENANT")]


def create(service: Service, output: Output, tenant: TenantName) -> None:
    """Make a secret and show it, this once. Two are valid at most, so that receivers can change to the new one."""
    from garnish.events import webhook_secret_call
    from gateway.routes.webhook_secrets import NewSecretReply

    screen = output.screen()
    with service.client(admin=True) as client:
        made = client.ask(webhook_secret_call(tenant), NewSecretReply)
    screen.line(made.secret)
    screen.note(f"its id is {made.secret_id}; it is not shown again")
    screen.result(made)


def list_secrets(service: Service, output: TableOutput, tenant: TenantName) -> None:
    """List the ids of the valid secrets."""
    from garnish.events import webhook_secrets_call
    from garnish.table import Column
    from garnish.text import shown_time
    from gateway.routes.webhook_secrets import SecretsReply

    screen = output.screen()
    with service.client(admin=True) as client:
        found = client.ask(webhook_secrets_call(tenant), SecretsReply)
    rows = [[each.secret_id, shown_time(each.created)] for each in found.secrets]
    screen.table([Column("ID", least=16), Column("CREATED", least=20)], rows)
    screen.result(found)


def delete(
    service: Service,
    tenant: TenantName,
    secret_id: Annotated[str, typer.Argument(help="As `list` shows it.", metavar="ID")],
) -> None:
    """End a secret: webhooks are not signed with it any more."""
    from garnish.events import end_webhook_secret_call
    from garnish.screen import Screen

    with service.client(admin=True) as client:
        client.send(end_webhook_secret_call(tenant, secret_id))
    Screen().line(f"{secret_id} has ended")


group = commands(
    {"create": create, "list": list_secrets, "delete": delete},
    name="webhook-secrets",
    help="Secrets that a tenant's webhooks are signed with: create, list, delete. With the admin key.",
    no_args_is_help=True,
)
