"""Operators' questions to a node's API process: passed on, answered, refused, or given up in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cluster.messages import PROTOCOL_VERSION, Adapter
from cluster.residency import (
    MAX_IDLE_TTLS,
    MAX_WANTED,
    AdapterState,
    AdapterStates,
    EvictOrder,
    Moved,
    PrefetchOrder,
    WantedAdapter,
    WantedResidency,
)
from node_agent.api import adapters as api_adapters
from node_agent.api import questions as api_questions
from node_agent.ipc import Answer, Evict, ListAdapters, Prefetch, PrefetchHints
from tests.node_agent.served_node import Node, run_scenario, served_node

DIGEST = "d" * 64
ADAPTER = Adapter(DIGEST, f"artifacts/v1/base/{DIGEST}", 1000, (8,))
ROUTES = ("/adapters", "/adapters/prefetch", "/adapters/evict", "/adapters/wanted")


async def ask(node: Node, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    async with node.session.request("GET" if body is None else "POST", node.url + path, data=body) as response:
        return response.status, await response.read()


def packed(order: PrefetchOrder | EvictOrder | WantedResidency) -> bytes:
    return msgspec.msgpack.encode(order)


def error_of(body: bytes) -> str:
    kind = msgspec.json.decode(body)["error"]["type"]
    assert isinstance(kind, str)
    return kind


def test_questions_reach_the_engine_and_answers_their_askers(tmp_path: Path, stories_dir: Path) -> None:
    """Two at once, answered the other way round."""
    states = AdapterStates([AdapterState(DIGEST, "absent", 1000, 1, 2, [8], ["device", "host", "no"])], unnamed=3)

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            listing = asyncio.create_task(ask(node, "/adapters"))
            question = await engine.hear()
            assert isinstance(question, ListAdapters)
            fetching = asyncio.create_task(ask(node, "/adapters/prefetch", packed(PrefetchOrder(ADAPTER))))
            order = await engine.hear()
            assert isinstance(order, Prefetch) and order.adapter == ADAPTER and order.id != question.id
            await engine.say(Answer("of nobody"), Answer(order.id, tier="host"), Answer(question.id, found=states))
            assert await listing == (200, msgspec.msgpack.encode(states))
            assert await fetching == (200, msgspec.msgpack.encode(Moved(DIGEST, "host")))
            evicting = asyncio.create_task(ask(node, "/adapters/evict", packed(EvictOrder(DIGEST))))
            evict = await engine.hear()
            assert isinstance(evict, Evict) and evict.digest == DIGEST
            await engine.say(Answer(evict.id, error_type="conflict", error="adapter dddd is in use"))
            status, body = await evicting
            assert (status, error_of(body)) == (409, "conflict")

    run_scenario(scenario())


def test_no_question_is_waited_for_for_ever(tmp_path: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_adapters, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(api_questions, "MAX_OPEN", 1)

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            status, body = await ask(node, "/adapters")
            assert (status, error_of(body)) == (504, "timeout")
            late = await engine.hear()
            assert isinstance(late, ListAdapters)
            assert await ask(node, "/adapters/prefetch", packed(PrefetchOrder(ADAPTER))) == (
                202,
                msgspec.msgpack.encode(Moved(DIGEST, None)),
            )
            monkeypatch.setattr(api_adapters, "ANSWER_SECONDS", 60.0)
            assert isinstance(await engine.hear(), Prefetch)
            waiting = asyncio.create_task(ask(node, "/adapters/evict", packed(EvictOrder(DIGEST))))
            evict = await engine.hear()
            assert isinstance(evict, Evict)
            status, body = await ask(node, "/adapters")
            assert (status, error_of(body)) == (429, "overloaded")
            await engine.say(Answer(late.id, found=AdapterStates([])), Answer(evict.id, tier="absent"))
            assert await waiting == (200, msgspec.msgpack.encode(Moved(DIGEST, "absent")))

    run_scenario(scenario())


def test_without_an_engine_there_is_no_answer(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            status, body = await ask(node, "/adapters")
            assert (status, error_of(body)) == (503, "unavailable")
            engine = await node.engine()
            asked = asyncio.create_task(ask(node, "/adapters"))
            await engine.hear()
            await engine.close()
            status, body = await asked
            assert (status, error_of(body)) == (502, "node_failed")

    run_scenario(scenario())


def test_orders_that_are_none_do_not_reach_the_engine(tmp_path: Path, stories_dir: Path) -> None:
    bad_names = {"digest": "../../secret", "adapter": {**msgspec.to_builtins(ADAPTER), "digest": "x"}}
    bodies = [
        (b"", 400),
        (b"\xc1", 400),
        (b"{}", 400),
        (msgspec.msgpack.encode({"digest": DIGEST, "v": 99, "adapter": msgspec.to_builtins(ADAPTER)}), 400),
        (msgspec.msgpack.encode(bad_names), 422),
        (b"x" * (api_adapters.WANTED_BYTES + 1), 413),
    ]

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            for body, expected in bodies:
                for path in ROUTES[1:3]:
                    assert (await ask(node, path, body))[0] == expected
            listing = asyncio.create_task(ask(node, "/adapters"))
            assert isinstance(await engine.hear(), ListAdapters), "the first that it hears of"
            listing.cancel()

    run_scenario(scenario())


def test_the_routes_need_the_secret(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            node.session.headers.clear()
            for path in ROUTES:
                status, body = await ask(node, path, None if path == "/adapters" else b"")
                assert (status, error_of(body)) == (401, "unauthenticated")

    run_scenario(scenario())


def test_what_is_wanted_reaches_the_engine(tmp_path: Path, stories_dir: Path) -> None:
    """As many as may be, with long names; fields of a later version are left out."""
    artifact = "artifacts/" + "n" * 1000
    adapters = [Adapter(f"{i:064x}", artifact, 1000, tuple(range(1, 129))) for i in range(MAX_WANTED)]
    idle = {f"{i:064x}": 60.0 for i in range(MAX_IDLE_TTLS)}
    wants = [WantedAdapter(adapter, "host", 0.5, pinned=True, provisioned="host") for adapter in adapters]
    most = WantedResidency(wants, 30.0, idle)
    later = {**msgspec.to_builtins(most), "a_later_field": 1}

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            assert (await ask(node, "/adapters/wanted", packed(most)))[0] == 503
            engine = await node.engine()
            for body in (packed(most), msgspec.msgpack.encode(later)):
                assert await ask(node, "/adapters/wanted", body) == (204, b"")
                assert await engine.hear() == PrefetchHints(most)

    run_scenario(scenario())


def test_wants_that_are_none_do_not_reach_the_engine(tmp_path: Path, stories_dir: Path) -> None:
    def body(seconds: float = 1.0, count: int = 1, v: int = PROTOCOL_VERSION, **changes: object) -> bytes:
        adapter = {**msgspec.to_builtins(ADAPTER), **{k: changes.pop(k) for k in ("digest", "bytes") if k in changes}}
        idle = changes.pop("idle_ttls", {})
        entry = {"adapter": adapter, "tier": "device", "chance": 0.5, **changes}
        return msgspec.msgpack.encode({"adapters": [entry] * count, "seconds": seconds, "idle_ttls": idle, "v": v})

    bodies = [
        (b"", 400),
        (b"\xc1", 400),
        (b"{}", 400),
        (body(v=99), 400),
        (body(tier="disk"), 400),
        (body(chance="likely"), 400),
        (body(count=MAX_WANTED + 1), 422),
        *((body(chance=chance), 422) for chance in (-0.1, 1.1, float("nan"), float("inf"))),
        *((body(seconds=seconds), 422) for seconds in (-1.0, float("nan"), float("inf"))),
        (body(digest="../../secret"), 422),
        (body(bytes=-1), 422),
        *((body(idle_ttls={DIGEST: seconds}), 422) for seconds in (0.0, -1.0, float("nan"), float("inf"))),
        (body(idle_ttls={"../../secret": 1.0}), 422),
        (body(idle_ttls={f"{i:064x}": 1.0 for i in range(MAX_IDLE_TTLS + 1)}), 422),
        (b"x" * (api_adapters.WANTED_BYTES + 1), 413),
    ]

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            for bad, expected in bodies:
                assert (await ask(node, "/adapters/wanted", bad))[0] == expected
            assert (await ask(node, "/adapters/wanted", body()))[0] == 204
            assert isinstance(await engine.hear(), PrefetchHints), "the first that it hears of"

    run_scenario(scenario())
