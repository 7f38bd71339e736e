"""Records of asynchronous calls, and the markers that list them.

    tenants/<tenant>/invocations/<id>.json        the event
    events/<index>/<tenant>/<time>-<nonce>-<id>-<holder>-<function>     a marker
    events/workers/<worker>                       heartbeat of a worker that runs events

`index` is the event's state, or `delivering` while its delivery is pending. Each change draws a new nonce: no change
touches another one's markers.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

from adapters.destinations import Destination
from adapters.names import is_name
from gateway.api.schema import InvokeReply
from gateway.jobs.job_store import JobRecord, Marker

State = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
LISTED_STATES: tuple[State, ...] = ("running", "queued", "failed", "expired", "succeeded", "cancelled")
"""States in the order in which a list of events shows them."""
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled", "expired")
DEAD_STATES: tuple[State, ...] = ("failed", "expired")
DELIVERING = "delivering"
DEFAULT_RETRIES = 2
MAX_AGE_S = 6 * 3600.0
NOBODY = "0"
_END_OF_TIME_MS = 10**14
"""Time, in milliseconds, from which markers of ended events count down, so that the newest are listed first."""


class EventError(msgspec.Struct, frozen=True):
    """Error of an attempt or an event. `type` has the values that it has in error replies."""

    type: str
    message: str


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """Attempt to run an event. It is stored before it starts."""

    started: float
    ended: float | None = None
    error: EventError | None = None


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """Delivery of an ended event to its destination."""

    to: Destination
    state: Literal["pending", "delivered", "failed"] = "pending"
    attempts: int = 0
    began: float = 0.0
    due: float = 0.0
    nonce: str = NOBODY
    problem: str | None = None


class EventRecord(JobRecord, frozen=True, kw_only=True):
    """Content of invocations/<id>.json. Times are Unix time (store clock)."""

    function: str
    qualifier: str | None = None
    request: dict[str, Any]
    fingerprint: str = ""
    """Hash of the request; calls with the same Idempotency-Key must have the same hash."""
    created: float
    retries: int = DEFAULT_RETRIES
    max_age: float = MAX_AGE_S
    deadline: float
    """Time after which no attempt begins."""
    state: State = "queued"
    due: float = 0.0
    """Earliest start of a queued event."""
    changed: float
    nonce: str
    holder: str = NOBODY
    attempts: tuple[Attempt, ...] = ()
    """Attempts since the event was accepted or last redriven."""
    result: InvokeReply | None = None
    error: EventError | None = None
    on_success: Destination | None = None
    on_failure: Destination | None = None
    delivery: Delivery | None = None
    depth: int = 0
    """Number of events before this one in a chain, in which each event calls the next as its destination."""
    redriven: int = 0
    removed: bool = False

    @property
    def ended(self) -> float | None:
        """Returns the time at which the event ended; None before its end."""
        return self.changed if self.state in ENDED else None


def folder(index: str, tenant: str) -> str:
    return f"events/{index}/{tenant}/"


def ended_before(index: str, tenant: str, time: float) -> str:
    """Returns a key with this property: all markers of the tenant that are listed after it belong to events that ended
    before `time`."""
    return f"{folder(index, tenant)}{_END_OF_TIME_MS - round(time * 1000):014d}-"


def parse_marker(key: str, modified: float = 0.0) -> Marker | None:
    """Returns the marker that a key encodes; None if the key is no marker's."""
    parts = key.split("/")
    fields = parts[-1].split("-", 4)
    if len(parts) != 4 or len(fields) != 5 or not fields[0].isdigit():
        return None
    digits, _, event_id, holder, function = fields
    ms = _END_OF_TIME_MS - int(digits) if parts[1] in ENDED else int(digits)
    return Marker(key, modified, parts[2], event_id, holder, function, ms / 1000)


def marker_key(index: str, event: EventRecord, time: float, nonce: str) -> str:
    ms = round(time * 1000)
    if index in ENDED:
        ms = _END_OF_TIME_MS - ms
    function = event.function if is_name(event.function) else ""  # the base model's id may have other characters
    return f"{folder(index, event.tenant)}{ms:014d}-{nonce}-{event.id}-{event.holder}-{function}"


def records_prefix(tenant: str) -> str:
    return f"tenants/{tenant}/invocations/"


def event_key(tenant: str, event_id: str) -> str:
    return f"{records_prefix(tenant)}{event_id}.json"


def new_nonce() -> str:
    return secrets.token_hex(6)


def markers_of(event: EventRecord) -> frozenset[str]:
    """Returns the keys of all markers that the event needs."""
    if event.removed:
        return frozenset()
    time, delivery = event.due if event.state == "queued" else event.changed, event.delivery
    key = marker_key(event.state, event, time, event.nonce)
    if delivery is None or delivery.state != "pending":
        return frozenset({key})
    return frozenset({key, marker_key(DELIVERING, event, delivery.due, delivery.nonce)})
