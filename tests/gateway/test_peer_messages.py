"""What workers of two releases publish to each other while one replaces the other."""

from __future__ import annotations

import msgspec
import pytest

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
