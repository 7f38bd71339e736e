"""Cluster state in memory: ordering, expiry, reservations, bounds; checked by a model in a drawn run."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.messages import NodeRecord, Resident, VersionMismatch
from cluster.node_table import Demand
from cluster.state import FORGET_SECONDS, PAST_EPOCHS, RESERVATION_SECONDS, MemoryClusterState, TooManyNodes

RECORD = NodeRecord(
    id="a",
    epoch="1",
    seq=1,
    url="http://127.0.0.1:1",
    state="ready",
    base="b",
    base_id="base",
    max_context=100,
    running=0,
    queued=0,
    queue_limit=2,
    kv_blocks_free=10,
    kv_blocks=10,
    block_tokens=16,
)


def record(**changed: Any) -> NodeRecord:
    return msgspec.structs.replace(RECORD, **changed)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> MemoryClusterState:
    return MemoryClusterState(clock, expiry=2.0, max_nodes=3)


def test_newer_records_win(state: MemoryClusterState) -> None:
    async def main() -> None:
        assert await state.publish(record(seq=5, running=5))
        assert not await state.publish(record(seq=4, running=4))
        assert not await state.publish(record(seq=5, running=9))
        assert [node.record.running for node in await state.nodes()] == [5]
        assert await state.publish(record(epoch="2", seq=1, running=1))
        assert not await state.publish(record(epoch="1", seq=99))  # late, from the process before
        assert [node.record.running for node in await state.nodes()] == [1]

    asyncio.run(main())


def test_residents_are_indexed_once_per_record(state: MemoryClusterState) -> None:
    def resident(digest: str, tier: str) -> Resident:
        return Resident(digest=digest, tier=tier, bytes=1, in_use=0)

    async def main() -> None:
        assert await state.publish(record(seq=1, residents=[resident("x", "host"), resident("y", "device")]))
        first, again = (await state.nodes())[0], (await state.nodes())[0]
        assert first.tiers == {"x": "host", "y": "device"}
        assert again.tiers is first.tiers  # however many requests look at it
        assert not await state.publish(record(seq=1, residents=[]))
        assert (await state.nodes())[0].tiers is first.tiers
        assert await state.publish(record(seq=2, residents=[resident("y", "host")]))
        assert (await state.nodes())[0].tiers == {"y": "host"}

    asyncio.run(main())


def test_remembered_epochs_are_bounded(state: MemoryClusterState) -> None:
    async def main() -> None:
        for epoch in range(PAST_EPOCHS + 3):
            assert await state.publish(record(epoch=f"e{epoch}"))
        assert not await state.publish(record(epoch=f"e{PAST_EPOCHS + 1}"))
        assert await state.publish(record(epoch="e0"))

    asyncio.run(main())


def test_an_old_record_does_not_keep_a_node_alive(state: MemoryClusterState, clock: Clock) -> None:
    async def main() -> None:
        await state.publish(record(seq=5))
        clock.now += 1.5
        await state.publish(record(seq=4))
        clock.now += 0.5
        assert await state.nodes() == []
        assert not await state.reserve("a", "r", Demand(), None)
        assert await state.silence("a", "1") == 2.0
        assert await state.silence("a", "2") == await state.silence("z", "1") == math.inf
        await state.publish(record(seq=6))
        assert [node.age for node in await state.nodes()] == [0.0]

    asyncio.run(main())


def test_reservations_count_and_end(state: MemoryClusterState, clock: Clock) -> None:
    async def main() -> None:
        await state.publish(record())
        assert await state.reserve("a", "r1", Demand(), None)
        assert await state.reserve("a", "r2", Demand(), None)
        assert not await state.reserve("a", "r3", Demand(), None)  # the queue's limit is 2
        await state.release("a", "r1")
        assert await state.reserve("a", "r3", Demand(), None)
        await state.publish(record(seq=2, acknowledged=["r2", "unknown"]))
        assert [node.reserved for node in await state.nodes()] == [1]
        clock.now += RESERVATION_SECONDS
        await state.publish(record(seq=3))
        assert [node.reserved for node in await state.nodes()] == [0]
        await state.release("z", "r3")

    asyncio.run(main())


def test_a_new_process_has_no_reservations(state: MemoryClusterState) -> None:
    async def main() -> None:
        await state.publish(record())
        await state.reserve("a", "r1", Demand(), None)
        await state.publish(record(epoch="2"))
        assert [node.reserved for node in await state.nodes()] == [0]

    asyncio.run(main())


def test_nodes_are_bounded_and_forgotten(state: MemoryClusterState, clock: Clock) -> None:
    async def main() -> None:
        for node_id in "abc":
            await state.publish(record(id=node_id))
        with pytest.raises(TooManyNodes):
            await state.publish(record(id="d"))
        clock.now += FORGET_SECONDS
        assert await state.publish(record(id="d"))
        assert [node.record.id for node in await state.nodes()] == ["d"]

    asyncio.run(main())


def test_other_protocol_versions_are_refused(state: MemoryClusterState) -> None:
    with pytest.raises(VersionMismatch):
        asyncio.run(state.publish(record(v=99)))


class Reservations(RuleBasedStateMachine):
    """One live node against a plain list of (request, end)."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.state = MemoryClusterState(self.clock, expiry=math.inf)
        self.open: dict[str, float] = {}
        self.seq = 0
        self.queued = 0
        self.publish([], 0)

    @rule(acknowledged=st.lists(st.sampled_from("abcdef"), max_size=3), queued=st.integers(0, 4))
    def publish(self, acknowledged: list[str], queued: int) -> None:
        self.seq += 1
        self.queued = queued
        sent = record(seq=self.seq, queued=queued, queue_limit=4, acknowledged=acknowledged)
        assert asyncio.run(self.state.publish(sent))
        self.open = {name: end for name, end in self.open.items() if name not in acknowledged}

    @rule(request=st.sampled_from("abcdef"))
    def reserve(self, request: str) -> None:
        live = {name: end for name, end in self.open.items() if end > self.clock.now}
        free = self.queued + len(live) < 4
        assert asyncio.run(self.state.reserve("a", request, Demand(), None)) is free
        if free:
            self.open[request] = self.clock.now + RESERVATION_SECONDS

    @rule(request=st.sampled_from("abcdef"))
    def release(self, request: str) -> None:
        asyncio.run(self.state.release("a", request))
        self.open.pop(request, None)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def counts_agree(self) -> None:
        live = sum(end > self.clock.now for end in self.open.values())
        assert [node.reserved for node in asyncio.run(self.state.nodes())] == [live]


Reservations.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestReservations = Reservations.TestCase
