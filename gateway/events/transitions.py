"""Transitions between an event's states. The functions are pure: they use neither a clock nor the store."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from adapters.functions import Policy
from cluster.errors import ServiceError
from gateway.api.schema import InvokeReply
from gateway.events.records import (
    DEFAULT_RETRIES,
    MAX_AGE_S,
    NOBODY,
    Attempt,
    Delivery,
    EventError,
    EventRecord,
    State,
    new_nonce,
)

RETRIED = frozenset({"node_failed", "overloaded", "unavailable", "timeout"})
"""Errors after which the same call may succeed: a node was lost, there was no room, or no token came in time."""
POSTPONED = frozenset({"rate_limited"})
"""Errors of calls that the tenant's own limits refused. Nothing ran, so these calls do not count as attempts."""
REFUSED = frozenset({"rate_limited", "overloaded", "unavailable"})
"""Errors with which other calls of the function would fail as well."""
FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 300.0
LOST = EventError("node_failed", "the gateway worker that ran it was lost")
STOPPED = EventError("unavailable", "the gateway worker that ran it was stopped")
TOO_OLD = EventError("timeout", "it was not done within its max_age")


def accepted(policy: Policy, now: float, **fields: Any) -> EventRecord:
    """Returns a new event of a function with this policy."""
    max_age = policy.max_age or MAX_AGE_S
    return EventRecord(
        created=now,
        changed=now,
        due=now,
        retries=DEFAULT_RETRIES if policy.retries is None else policy.retries,
        max_age=max_age,
        deadline=now + max_age,
        nonce=new_nonce(),
        **fields,
    )


def claimed(event: EventRecord, worker: str, now: float) -> EventRecord:
    """Returns the queued event as claimed by the worker, with a new attempt."""
    return _changed(event, "running", now, holder=worker, attempts=(*event.attempts, Attempt(now)))


def succeeded(event: EventRecord, result: InvokeReply, now: float) -> EventRecord:
    ended = _attempt_ended(event, now, None)
    return _ended(ended, "succeeded", now, result=result)


def failed(event: EventRecord, error: ServiceError, now: float) -> EventRecord:
    """Returns the event after its running attempt failed. It is queued again if another attempt may succeed, else it is
    a dead letter."""
    event_error = EventError(error.type, error.message)
    if error.type in POSTPONED:
        return postponed(event, error, now)
    if error.type not in RETRIED:
        return _ended(_attempt_ended(event, now, event_error), "failed", now, error=event_error)
    return retried(event, event_error, now, _pause(len(event.attempts), error.retry_after))


def postponed(event: EventRecord, error: ServiceError, now: float) -> EventRecord:
    """Returns the running event as queued again, to start after a pause. Its last attempt is removed, because nothing
    ran.

    The event's deadline limits how often this happens.
    """
    event_error = EventError(error.type, error.message)
    taken_back = msgspec.structs.replace(event, attempts=event.attempts[:-1], error=event_error)
    return _requeued(taken_back, now + _pause(len(event.attempts), error.retry_after), now)


def retried(event: EventRecord, error: EventError, now: float, pause: float) -> EventRecord:
    """Returns the running event as queued again, to start after `pause` seconds. If this was its last attempt, the
    event is failed instead."""
    ended = _attempt_ended(event, now, error)
    if len(event.attempts) > event.retries:
        return _ended(ended, "failed", now, error=error)
    return _requeued(ended, now + pause, now)


def expired(event: EventRecord, now: float) -> EventRecord:
    """Returns the event as expired. Its error is the error of its last attempt, if it had an attempt."""
    last = next((attempt.error for attempt in reversed(event.attempts) if attempt.error), event.error)
    return _ended(event, "expired", now, error=last or TOO_OLD)


def cancelled(event: EventRecord, now: float) -> EventRecord:
    """Returns the event as cancelled by its owner, without a delivery."""
    ended = _attempt_ended(event, now, None) if event.state == "running" else event
    return _changed(ended, "cancelled", now, error=EventError("cancelled", "it was cancelled"))


def redriven(event: EventRecord, now: float) -> EventRecord:
    """Returns a dead letter as queued again, like a new event."""
    fresh: dict[str, Any] = {"attempts": (), "error": None, "delivery": None, "redriven": event.redriven + 1}
    return _requeued(msgspec.structs.replace(event, deadline=now + event.max_age, **fresh), now, now)


def _pause(attempts: int, at_least: float | None) -> float:
    """Returns the seconds to pause before the next attempt. They double with each attempt, and are random in the upper
    half so that retries spread."""
    bound = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** max(attempts - 1, 0))
    return max(at_least or 0.0, 0.0) + random.uniform(bound / 2, bound)


def _attempt_ended(event: EventRecord, now: float, error: EventError | None) -> EventRecord:
    last = msgspec.structs.replace(event.attempts[-1], ended=now, error=error)
    return msgspec.structs.replace(event, attempts=(*event.attempts[:-1], last))


def _requeued(event: EventRecord, next_attempt: float, now: float) -> EventRecord:
    return _changed(event, "queued", now, due=next_attempt)


def _ended(event: EventRecord, state: State, now: float, **fields: Any) -> EventRecord:
    to = event.on_success if state == "succeeded" else event.on_failure
    delivery = None if to is None else Delivery(to=to, began=now, due=now, nonce=new_nonce())
    return _changed(event, state, now, delivery=delivery, **fields)


def _changed(event: EventRecord, state: State, now: float, *, holder: str = NOBODY, **fields: Any) -> EventRecord:
    return msgspec.structs.replace(event, state=state, changed=now, nonce=new_nonce(), holder=holder, **fields)
