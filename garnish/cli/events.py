"""`garnish events` and `garnish webhook-secrets`: asynchronous calls, and secrets that sign a tenant's webhooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from garnish.cli.options import Output, Service, TableOutput, TenantService, commands
from garnish.screen import Column, Screen
from garnish.sizes import format_time

if TYPE_CHECKING:
    from gateway.events.messages import EventReply

EventState = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
Id = Annotated[str, typer.Argument(help="As `garnish invoke --async` has printed it.")]
Function = Annotated[str | None, typer.Option("--function", help="Those of this function alone.")]
TenantName = Annotated[str, typer.Argument(help="The tenant.", metavar="TENANT")]


def list_events(
    service: TenantService,
    output: TableOutput,
    function: Function = None,
    in_state: Annotated[EventState | None, typer.Option("--in", help="Those in this state alone.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100)] = 20,
    after: Annotated[str | None, typer.Option("--after", help="`next` of the page before.")] = None,
) -> None:
    """List asynchronous calls, beginning with those that run or wait."""
    screen = output.screen()
    with service.client(service.tenant) as client:
        page = client.events(function, in_state, limit, after)
    columns = [
        Column("ID", min_width=28),
        Column("FUNCTION", min_width=10),
        Column("STATE", min_width=9),
        Column("CREATED", min_width=19),
        Column("ATTEMPTS", number=True),
        Column("ERROR", min_width=16),
    ]
    rows = [
        [
            item.id,
            item.function,
            item.state,
            format_time(item.created),
            str(len(item.attempts)),
            item.error.type if item.error else "-",
        ]
        for item in page.invocations
    ]
    screen.table(columns, rows)
    if page.next is not None:
        screen.notice(f"there are more: --after {page.next}")
    screen.result(page)


def get_event(service: TenantService, output: Output, event_id: Id) -> None:
    """Show the state, attempts and result of an asynchronous call."""
    with service.client(service.tenant) as client:
        _show(output.screen(), client.event(event_id))


def cancel_event(service: TenantService, output: Output, event_id: Id) -> None:
    """Cancel an asynchronous call that has not ended."""
    with service.client(service.tenant) as client:
        _show(output.screen(), client.cancel(event_id))


def redrive_events(
    service: TenantService,
    output: Output,
    event_id: Annotated[str | None, typer.Argument(help="A failed call; without it --all.")] = None,
    redrive_all: Annotated[bool, typer.Option("--all", help="All that failed, up to 500.")] = False,
    function: Function = None,
) -> None:
    """Queue calls again that have failed for good."""
    if (event_id is None) != redrive_all or (event_id is not None and function is not None):
        raise typer.BadParameter("expected an id, or --all, which --function may narrow")
    screen = output.screen()
    with service.client(service.tenant) as client:
        if event_id is not None:
            return _show(screen, client.redrive(event_id))
        reply = client.redrive_all(function)
    screen.line(f"{reply.redriven} queued again")
    if reply.more:
        screen.notice("there may be more: the same command again")
    screen.result(reply)
    return None


def _show(screen: Screen, event: EventReply) -> None:
    screen.line(f"{event.id}: {event.state}, {len(event.attempts)} of at most {event.retries + 1} attempts")
    if event.error is not None:
        screen.line(f"{event.error.type}: {event.error.message}")
    if event.delivery is not None:
        screen.line(f"destination: {event.delivery.state} {event.delivery.problem or ''}".rstrip())
    if event.result is not None:
        screen.line(event.result.output.text)
    screen.result(event)


def create_secret(service: Service, output: Output, tenant: TenantName) -> None:
    """Create a secret and show it once. At most two are valid, so that receivers can change to the new one."""
    from garnish.calls import create_webhook_secret_call
    from gateway.routes.webhook_secrets import NewSecretReply

    screen = output.screen()
    with service.client(admin=True) as client:
        created = client.ask(create_webhook_secret_call(tenant), NewSecretReply)
    screen.line(created.secret)
    screen.notice(f"its id is {created.secret_id}; it is not shown again")
    screen.result(created)


def list_secrets(service: Service, output: TableOutput, tenant: TenantName) -> None:
    """List the ids of the valid secrets."""
    from garnish.calls import webhook_secrets_call
    from gateway.routes.webhook_secrets import SecretsReply

    screen = output.screen()
    with service.client(admin=True) as client:
        reply = client.ask(webhook_secrets_call(tenant), SecretsReply)
    rows = [[each.secret_id, format_time(each.created)] for each in reply.secrets]
    screen.table([Column("ID", min_width=16), Column("CREATED", min_width=20)], rows)
    screen.result(reply)


def end_secret(
    service: Service,
    tenant: TenantName,
    secret_id: Annotated[str, typer.Argument(help="As `list` shows it.", metavar="ID")],
) -> None:
    """End a secret: webhooks are no longer signed with it."""
    from garnish.calls import end_webhook_secret_call

    with service.client(admin=True) as client:
        client.send(end_webhook_secret_call(tenant, secret_id))
    Screen().line(f"{secret_id} has ended")


group = commands(
    {"list": list_events, "get": get_event, "cancel": cancel_event, "redrive": redrive_events},
    name="events",
    help="Asynchronous calls: list, get, cancel, redrive.",
    no_args_is_help=True,
)
secrets = commands(
    {"create": create_secret, "list": list_secrets, "delete": end_secret},
    name="webhook-secrets",
    help="Secrets that a tenant's webhooks are signed with: create, list, delete. With the admin key.",
    no_args_is_help=True,
)
