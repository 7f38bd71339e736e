"""Asynchronous calls over HTTP, against a node that echoes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from running_gateway import Running, until
from stub_node import die_at_once, hang_before_first, refuse_for_good

from gateway.events.messages import EventReply


@pytest.fixture
def client(deployed: Running) -> httpx.Client:
    return deployed.client()


def submit(client: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "Once", "max_tokens": 3, "background": True, **fields}
    return client.post("/invoke/pirate", json=body, headers=headers)


def event_of(client: httpx.Client, event_id: str) -> EventReply:
    reply = client.get(f"/invocations/{event_id}")
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=EventReply)


def ended(client: httpx.Client, event_id: str) -> EventReply:
    until(lambda: event_of(client, event_id).ended is not None)
    return event_of(client, event_id)


def test_a_call_is_run_later(client: httpx.Client, deployed: Running) -> None:
    reply = submit(client)
    assert reply.status_code == 202, reply.text
    accepted = msgspec.json.decode(reply.content, type=EventReply)
    assert reply.headers["location"] == f"/invocations/{accepted.id}"
    assert (accepted.state, accepted.result) == ("queued", None)
    event = ended(client, accepted.id)
    assert event.state == "succeeded"
    assert event.result is not None
    assert (event.result.id, event.result.output.text) == (event.id, " t0 t1 t2")
    assert [attempt.error for attempt in event.attempts] == [None]
    asked = deployed.nodes[0].received[-1]
    assert (asked.slo_class, asked.ttft) == ("best_effort", None)
