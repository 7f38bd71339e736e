"""Messages between gateway workers and the one that leads."""

from __future__ import annotations

import msgspec

from cluster.redis_link import RedisLink
from gateway.residency.arrivals import CallsCounted
from gateway.residency.manual_holds import ManualHold
from gateway.workers.channel import Channel

MAX_WAITING = 1000
"""Messages; old counts are worth nothing."""


class HeldAsked(msgspec.Struct, frozen=True, array_like=True, tag="held_asked"):
    """Query for what was warmed by hand. A worker sends it that begins to lead: it may have started after that was
    published."""


class ForecastAsked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Query for the forecast of the function, and what was done on it, to the worker that leads."""

    number: str
    tenant: str
    function: str


class ForecastAnswered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    number: str
    reply: bytes
    """JSON of ForecastReply."""


Message = CallsCounted | ManualHold | HeldAsked | ForecastAsked | ForecastAnswered


def make_channel(link: RedisLink | None) -> Channel[Message]:
    """Has to be made before the link connects. It is apart from the peers' channel: workers of an earlier release don't
    listen to it, and would understand nothing of a letter with a message that they do not know."""
    return Channel(link, "residency", Message, MAX_WAITING)
