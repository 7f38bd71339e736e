"""What callers read of an asynchronous call."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from adapters.destinations import Destination
from gateway.api.schema import InvokeReply
from gateway.events.records import EventError, EventRecord, State


class AttemptItem(msgspec.Struct, frozen=True):
    started: float
    ended: float | None
    """Null while it runs."""
    error: EventError | None


class DeliveryItem(msgspec.Struct, frozen=True):
    """What became of telling the destination."""

    to: Destination
    state: str
    """pending, delivered or failed"""
    attempts: int
    problem: str | None


class EventItem(msgspec.Struct, frozen=True, kw_only=True):
    """An asynchronous call, as lists have it. Times are Unix time by the registry's clock."""

    id: str
    function: str
    qualifier: str | None
    state: State
    created: float
    due: float | None
    """When a queued one may begin."""
    ended: float | None
    deadline: float
    """No attempt begins after it."""
    attempts: list[AttemptItem]
    """At most `retries` + 1."""
    retries: int
    error: EventError | None
    """Why it failed; of a queued one, why the last attempt did."""


class EventReply(EventItem, frozen=True, kw_only=True):
    result: InvokeReply | None
    """As the call itself would have answered; only of a succeeded one."""
    delivery: DeliveryItem | None
    """Null without a destination."""


Item = TypeVar("Item", bound=EventItem)


class EventList(msgspec.Struct, frozen=True):
    invocations: list[EventItem]
    next: str | None
    """`after` of the next page; null: this is the last one."""


class RedriveReply(msgspec.Struct, frozen=True):
    redriven: int
    more: bool
    """Whether there may be more: call again."""


def item_of(event: EventRecord) -> EventItem:
    return _shown(event, EventItem)


def reply_of(event: EventRecord) -> EventReply:
    return _shown(event, EventReply)


def _shown(event: EventRecord, kind: type[Item]) -> Item:
    item = msgspec.convert(event, kind, from_attributes=True)
    return item if event.state == "queued" else msgspec.structs.replace(item, due=None)
