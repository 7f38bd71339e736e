"""Replies about asynchronous calls."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from adapters.destinations import Destination
from gateway.api.schema import InvokeReply
from gateway.events.records import EventError, EventRecord, State


class AttemptItem(msgspec.Struct, frozen=True):
    started: float
    ended: float | None
    error: EventError | None


class DeliveryItem(msgspec.Struct, frozen=True):
    """Delivery of an ended call to its destination."""

    to: Destination
    state: str
    """State of the delivery: `pending`, `delivered` or `failed`."""
    attempts: int
    problem: str | None


class EventItem(msgspec.Struct, frozen=True, kw_only=True):
    """Asynchronous call, without its result. Times are Unix time by the registry's clock."""

    id: str
    function: str
    qualifier: str | None
    state: State
    created: float
    due: float | None
    ended: float | None
    deadline: float
    attempts: list[AttemptItem]
    retries: int
    error: EventError | None
    """Error of the call. While the call is queued, it is the error of the last attempt."""


class EventReply(EventItem, frozen=True, kw_only=True):
    result: InvokeReply | None
    delivery: DeliveryItem | None


Item = TypeVar("Item", bound=EventItem)


class EventList(msgspec.Struct, frozen=True):
    invocations: list[EventItem]
    next: str | None


class RedriveReply(msgspec.Struct, frozen=True):
    redriven: int
    more: bool
    """True if there may be more dead letters. In that case the client calls again."""


def item_of(event: EventRecord) -> EventItem:
    return _shown(event, EventItem)


def reply_of(event: EventRecord) -> EventReply:
    return _shown(event, EventReply)


def _shown(event: EventRecord, kind: type[Item]) -> Item:
    item = msgspec.convert(event, kind, from_attributes=True)
    return item if event.state == "queued" else msgspec.structs.replace(item, due=None)
