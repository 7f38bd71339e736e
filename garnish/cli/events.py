"""`garnish events`: asynchronous calls, and those of them that failed for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from garnish.cli.options import Output, TableOutput, TenantService, commands

if TYPE_CHECKING:
    from garnish.screen import Screen
    from gateway.events.messages import EventReply


EventState = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
Id = Annotated[str, typer.Argument(help="As `garnish invoke --async` has printed it.")]
Function = Annotated[str | None, typer.Option("--function", help="Those of this function alone.")]


def list_events(
    service: TenantService,
    output: TableOutput,
    function: Function = None,
    in_state: Annotated[EventState | None, typer.Option("--in", help="Those in this state alone.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100)] = 20,
    after: Annotated[str | None, typer.Option("--after", help="`next` of the page before.")] = None,
) -> None:
    """List asynchronous calls, those that run or wait first."""
    from garnish.table import Column
    from garnish.text import shown_time

    screen = output.screen()
    with service.client(service.tenant) as client:
        page = client.events(function, in_state, limit, after)
    columns = [
        Column("ID", least=28),
        Column("FUNCTION", least=10),
        Column("STATE", least=9),
        Column("CREATED", least=19),
        Column("ATTEMPTS", number=True),
        Column("ERROR", least=16),
    ]
    rows = [
        [
            item.id,
            item.function,
            item.state,
            shown_time(item.created),
            str(len(item.attempts)),
            item.error.type if item.error else "-",
        ]
        for item in page.invocations
    ]
    screen.table(columns, rows)
    if page.next is not None:
        screen.note(f"there are more: --after {page.next}")
    screen.result(page)


def get_event(service: TenantService, output: Output, event_id: Id) -> None:
    """Show a call's state, attempts and result."""
    with service.client(service.tenant) as client:
        _show(output.screen(), client.event(event_id))


def cancel_event(service: TenantService, output: Output, event_id: Id) -> None:
    """Cancel a call that has not ended."""
    with service.client(service.tenant) as client:
        _show(output.screen(), client.cancel(event_id))


def redrive_events(
    service: TenantService,
    output: Output,
    event_id: Annotated[str | None, typer.Argument(help="A failed call; without it --all.")] = None,
    redrive_all: Annotated[bool, typer.Option("--all", help="All that failed, up to 500.")] = False,
    function: Function = None,
) -> None:
    """Queue calls again that failed for good."""
    if (event_id is None) != redrive_all or (event_id is not None and function is not None):
        raise typer.BadParameter("expected an id, or --all, which --function may narrow")
    screen = output.screen()
    with service.client(service.tenant) as client:
        if event_id is not None:
            return _show(screen, client.redrive(event_id))
        reply = client.redrive_all(function)
    screen.line(f"{reply.redriven} queued again")
    if reply.more:
        screen.note("there may be more: the same command again")
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


group = commands(
    {"list": list_events, "get": get_event, "cancel": cancel_event, "redrive": redrive_events},
    name="events",
    help="Asynchronous calls: list, get, cancel, redrive.",
    no_args_is_help=True,
)
