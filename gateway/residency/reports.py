"""Messages between gateway workers and the leader."""

from __future__ import annotations

import msgspec

from cluster.redis_link import RedisLink
from gateway.residency.arrivals import CallsCounted
from gateway.residency.manual_holds import ManualHold
from gateway.workers.channel import Channel

MAX_WAITING = 1000
"""Maximum messages that wait to be sent. The limit is low because old counts are useless."""


class HeldAsked(msgspec.Struct, frozen=True, array_like=True, tag="held_asked"):
    """Query for all manual holds, sent by a new leader: it may have started after they were published."""


class ForecastAsked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Query to the leader for a function's forecast, and for the adapters that were ordered because of it."""

    number: str
    tenant: str
    function: str


class ForecastAnswered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    number: str
    reply: bytes
    """JSON of ForecastReply."""


Message = CallsCounted | ManualHold | HeldAsked | ForecastAsked | ForecastAnswered


def make_channel(link: RedisLink | None) -> Channel[Message]:
    """Returns the channel; the link must not be connected yet.

    It is separate from the peers' channel, because its counts must not displace waiting messages of that channel.
    """
    return Channel(link, "residency", Message, MAX_WAITING)
