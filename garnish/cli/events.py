"""`garnish events`: asynchronous calls, and those of them that failed for good."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from garnish.cli.options import DEFAULT_STATE, AsJson, NoHeader, State, Tenant, Url, open_client

if TYPE_CHECKING:
    from garnish.screen import Screen
    from gateway.events.messages import EventReply


class EventState(StrEnum):
    queued = "queued"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"
    expired = "expired"


Id = Annotated[str, typer.Argument(help="As `garnish invoke --async` has printed it.")]
Function = Annotated[str | None, typer.Option("--function", help="Those of this function alone.")]

events = typer.Typer(help="Asynchronous calls: list, get, cancel, redrive.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(events, name="events")


@events.command("list")
def list_events(
    function: Function = None,
    in_state: Annotated[EventState | None, typer.Option("--in", help="Those in this state alone.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100)] = 20,
    after: Annotated[str | None, typer.Option("--after", help="`next` of the page before.")] = None,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    no_header: NoHeader = False,
    as_json: AsJson = False,
) -> None:
    """List asynchronous calls, those that run or wait first."""
    from garnish.screen import Screen
    from garnish.table import Column

    screen = Screen(as_json, header=not no_header)
    with open_client(url, state, tenant) as client:
        page = client.events(function, in_state.value if in_state else None, limit, after)
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
            _time(item.created),
            str(len(item.attempts)),
            item.error.type if item.error else "-",
        ]
        for item in page.invocations
    ]
    screen.table(columns, rows)
    if page.next is not None:
        screen.note(f"there are more: --after {page.next}")
    screen.result(page)


@events.command("get")
def get_event(
    event_id: Id,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Show a call's state, attempts and result."""
    from garnish.screen import Screen

    with open_client(url, state, tenant) as client:
        _show(Screen(as_json), client.event(event_id))


@events.command("cancel")
def cancel_event(
    event_id: Id,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a call that has not ended."""
    from garnish.screen import Screen

    with open_client(url, state, tenant) as client:
        _show(Screen(as_json), client.cancel(event_id))


@events.command("redrive")
def redrive_events(
    event_id: Annotated[str | None, typer.Argument(help="A failed call; without it --all.")] = None,
    redrive_all: Annotated[bool, typer.Option("--all", help="All that failed, up to 500.")] = False,
    function: Function = None,
    url: Url = None,
    state: State = DEFAULT_STATE,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Queue calls again that failed for good."""
    from garnish.screen import Screen

    if (event_id is None) != redrive_all or (event_id is not None and function is not None):
        raise typer.BadParameter("expected an id, or --all, which --function may narrow")
    screen = Screen(as_json)
    with open_client(url, state, tenant) as client:
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


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
