"""What workers of two releases publish to each other while one replaces the other."""

from __future__ import annotations

import msgspec
import pytest

from cluster.messages import Adapter
from gateway.residency import reports
from gateway.residency.arrivals import Arrival, CallsCounted
from gateway.residency.manual_holds import ManualHold
from gateway.residency.reports import ForecastAnswered, ForecastAsked, HeldAsked
from gateway.workers.peers import (
    CallsRevoked,
    DigestCalled,
    ExplanationAnswered,
    ExplanationAsked,
    FunctionChanged,
    Message,
    TenantChanged,
)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (["changed", "acme", "f"], FunctionChanged("acme", "f")),
        (["tenant", "acme"], TenantChanged("acme")),
        (["revoked", "acme", "f", "deleted", "1"], CallsRevoked("acme", "f", "deleted", "1")),
        (["called", "acme", "ab12"], DigestCalled("acme", "ab12")),
        (["asked", "1", "req_1", None], ExplanationAsked("1", "req_1", None)),
        (["answered", "1", b"{}"], ExplanationAnswered("1", b"{}")),
    ],
)
def test_a_message_keeps_its_tag(wire: list[object], message: Message) -> None:
    data = msgspec.msgpack.encode(wire)
    assert msgspec.msgpack.encode(message) == data
    assert msgspec.msgpack.decode(data, type=Message) == message


ADAPTER = Adapter("ab12", "artifacts/ab12", 7, (8,))
PACKED = msgspec.msgpack.decode(msgspec.msgpack.encode(ADAPTER))


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (["counted", [["acme", "f", PACKED, 2]]], CallsCounted([Arrival("acme", "f", ADAPTER, 2)])),
        (["held", "acme", "f", PACKED, "n", "host", 9.0], ManualHold("acme", "f", ADAPTER, "n", "host", 9.0)),
        (["held_asked"], HeldAsked()),
        (["asked", "1", "acme", "f"], ForecastAsked("1", "acme", "f")),
        (["answered", "1", b"{}"], ForecastAnswered("1", b"{}")),
    ],
)
def test_a_message_to_the_leader_keeps_its_tag(wire: list[object], message: reports.Message) -> None:
    data = msgspec.msgpack.encode(wire)
    assert msgspec.msgpack.encode(message) == data
    assert msgspec.msgpack.decode(data, type=reports.Message) == message
