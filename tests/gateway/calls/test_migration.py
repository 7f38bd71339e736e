"""Calls that the policy moves go on elsewhere once they have a place there, and stay where they are until then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running_gateway import Running, until, until_received
from stub_node import StubNode, done, echo, token

from cluster.messages import Event, GenerateRequest, Started
from gateway.scheduling.dlora import Dlora

CALL = {"prompt": "x", "max_tokens": 5, "seed": 7}
PATH = "/invoke/stories260K"
TEXT = " t0 t1 t2 t3 t4"
CROWDED = {"running": 8}
"""What a node says of itself that has far more to do than the other."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked again and again whether calls are to move."""
    monkeypatch.setattr(Dlora, "period", 0.05)


async def held_after_one(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    yield token(0, " t0")
    await node.until(node.go_on)
    for index in range(1, 5):
        yield token(index, f" t{index}")
    yield done(asked, 5)


async def held_in_queue(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    await node.until(node.go_on)
    yield Started(node=node.node_id, cold_start="none")
    yield done(asked, 0)


def routed_to(running: Running, call: str) -> list[tuple[str, str | None]]:
    """Outcomes and nodes, in their order."""
    decisions = running.client().get(f"/explain/{call}").json()["decisions"]
    return [(entry["decision"]["outcome"], entry["decision"].get("node")) for entry in decisions]


def moved(running: Running, script: Any) -> tuple[Any, StubNode, StubNode]:
    """What a call says in the end that came to a crowded node, and both nodes."""
    crowded = running.node(script, "a-crowded")
    with ThreadPoolExecutor() as pool:
        call = pool.submit(running.client().post, PATH, json=CALL)
        until_received(crowded, 1, [call])
        crowded.publish(running.url, **CROWDED)
        idle = running.node(echo, "b-idle")
        reply = call.result(60)
    assert reply.status_code == 200, reply.text
    assert crowded.disconnected.wait(60), "the first node goes on with a call that has gone"
    return {**reply.json(), "node": reply.headers["x-garnish-node"]}, crowded, idle


def test_a_running_call_goes_on_behind_its_tokens(start: Callable[..., Running]) -> None:
    running = start(policy="dlora")
    said, crowded, idle = moved(running, held_after_one)
    assert (said["output"]["text"], said["node"], said["timing"]["resumed"]) == (TEXT, "b-idle", 1)
    assert [asked.generated for asked in (*crowded.received, *idle.received)] == [[], [100]]
    assert routed_to(running, said["id"]) == [("routed", "a-crowded"), ("routed", "b-idle")]
    total = running.client().get("/usage").json()["total"]
    assert (total["requests"], total["completion_tokens"]) == (1, 5)


def test_a_waiting_call_begins_elsewhere(start: Callable[..., Running]) -> None:
    said, crowded, idle = moved(start(policy="dlora"), held_in_queue)
    assert (said["output"]["text"], said["node"], said["timing"]["resumed"]) == (TEXT, "b-idle", 0)
    assert [asked.generated for asked in (*crowded.received, *idle.received)] == [[], []]


def test_a_call_stays_where_it_is_until_it_has_a_place(start: Callable[..., Running]) -> None:
    running = start(policy="dlora")
    crowded = running.node(held_after_one, "a-crowded")
    with ThreadPoolExecutor() as pool:
        call = pool.submit(running.client().post, PATH, json=CALL)
        until_received(crowded, 1, [call])
        crowded.publish(running.url, **CROWDED)
        full = running.node(echo, "b-full", queued=1, queue_limit=1)
        until(lambda: len(routed_to(running, crowded.received[0].id)) > 1)
        crowded.go_on.set()
        reply = call.result(60)
    said = reply.json()
    assert (said["output"]["text"], said["timing"]["resumed"]) == (TEXT, 0)
    assert reply.headers["x-garnish-node"] == "a-crowded"
    assert full.received == []
    assert routed_to(running, said["id"])[:2] == [("routed", "a-crowded"), ("overloaded", None)]
