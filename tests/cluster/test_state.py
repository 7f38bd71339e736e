"""Cluster state, in memory and in Redis: ordering, expiry, reservations, bounds; checked by a model in a drawn run."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from worlds import World, news, until

from cluster.messages import PROTOCOL_VERSION, VersionMismatch
from cluster.news import Changes, NodeReport, Resident
from cluster.node_book import PAST_EPOCHS, TooManyNodes
from cluster.node_table import STANDARD, Demand
from cluster.received import Received
from cluster.state import RESERVATION_SECONDS, ClusterState
from tests.support.draws import draws
from tests.support.redis_server import RedisServer


def test_newer_records_win(world: World) -> None:
    async def main(state: ClusterState) -> None:
        assert await state.publish(news(seq=5, running=5)) == "taken"
        assert await state.publish(news(seq=4, running=4)) == "older"
        assert await state.publish(news(seq=5, running=9)) == "older"
        assert [node.record.running for node in await state.nodes()] == [5]
        assert await state.publish(news(epoch="2", seq=1, running=1)) == "taken"
        assert await state.publish(news(epoch="1", seq=99)) == "older"  # late, from the process before
        assert [node.record.running for node in await state.nodes()] == [1]

    world.run(main)


def test_residents_change_by_numbers(world: World) -> None:
    def resident(digest: str, tier: str) -> Resident:
        return Resident(digest=digest, tier=tier, bytes=1, in_use=0)

    def change(seq: int, since: int, at: int, *residents: Resident) -> NodeReport:
        told = news(seq=seq)
        return NodeReport(told.heartbeat, None, Changes(since, at, list(residents)))

    async def main(state: ClusterState) -> None:
        async def tiers() -> dict[str, str]:
            return {digest: found.tier for digest, found in (await state.nodes())[0].residents.items()}

        first = news(seq=1, residents=[resident("x", "host"), resident("y", "device")])
        assert await state.publish(change(1, 0, 0)) == "gap", "nothing is known yet"
        assert await state.publish(first) == "taken"
        assert await tiers() == {"x": "host", "y": "device"}
        assert await state.publish(change(2, 2, 3, resident("z", "host"))) == "gap", "change 2 is not known"
        assert await state.publish(change(2, 1, 3, resident("x", "absent"), resident("z", "host"))) == "taken"
        assert await tiers() == {"y": "device", "z": "host"}
        assert await state.publish(change(3, 1, 3, resident("x", "absent"), resident("z", "host"))) == "taken"
        assert await tiers() == {"y": "device", "z": "host"}, "what is known may come again"
        assert await state.publish(change(3, 1, 4, resident("v", "host"))) == "older"
        assert await state.publish(change(4, 3, 3)) == "taken"
        assert await tiers() == {"y": "device", "z": "host"}
        restarted = msgspec.structs.replace(change(1, 3, 3), heartbeat=news(epoch="2").heartbeat)
        assert await state.publish(restarted) == "gap", "another process counts anew"
        assert await state.publish(news(epoch="2", residents=[resident("y", "disk")])) == "taken"
        assert await tiers() == {"y": "disk"}

    world.run(main)


def test_remembered_epochs_are_bounded(world: World) -> None:
    async def main(state: ClusterState) -> None:
        for epoch in range(PAST_EPOCHS + 3):
            assert await state.publish(news(epoch=f"e{epoch}")) == "taken"
        assert await state.publish(news(epoch=f"e{PAST_EPOCHS + 1}")) == "older"
        assert await state.publish(news(epoch="e0")) == "taken"

    world.run(main)


def test_what_a_dead_process_sent_comes_late(world: World) -> None:
    """Behind its successor's first news. The successor is heard again once the dead one is silent."""

    async def main(state: ClusterState) -> None:
        assert await state.publish(news(epoch="3", seq=1)) == "taken"
        assert await state.publish(news(epoch="2", seq=1)) == "taken", "nobody can know"
        assert await state.publish(news(epoch="3", seq=2)) == "older"
        await world.wait(1.1)
        assert await state.publish(news(epoch="3", seq=3, running=3)) == "taken"
        assert await state.publish(news(epoch="2", seq=2)) == "older"
        assert await state.publish(news(epoch="3", seq=4, running=4)) == "taken"
        assert [node.record.running for node in await state.nodes()] == [4]

    world.run(main, expiry=1.0)


def test_an_old_record_does_not_keep_a_node_alive(world: World) -> None:
    async def main(state: ClusterState) -> None:
        await state.publish(news(seq=5))
        await world.wait(1.2)
        await state.publish(news(seq=4))
        await world.wait(0.5)
        assert await state.nodes() == []
        assert not await state.reserve("a", "r", Demand(), None)
        assert await state.seconds_since_report("a", "1") >= 1.6
        assert await state.seconds_since_report("a", "2") == await state.seconds_since_report("z", "1") == math.inf
        await state.publish(news(seq=6))
        assert [node.age < 1.6 for node in await state.nodes()] == [True]

    world.run(main, expiry=1.6)


def test_reservations_count_and_end(world: World) -> None:
    async def main(state: ClusterState) -> None:
        await state.publish(news())
        assert await state.reserve("a", "r1", Demand(), None)
        second = await state.reserve("a", "r2", Demand(), None)
        assert second is not None
        assert not await state.reserve("a", "r3", Demand(), None)  # the queue's limit is 2
        await state.release("a", "r1")
        assert await state.reserve("a", "r3", Demand(), None)
        await state.publish(news(seq=2, received=Received().with_one(second)))
        assert [node.reserved for node in await state.nodes()] == [1]
        await state.release("z", "r3")
        await state.release("a", "r3")
        await state.release("a", "r3")
        assert [node.reserved for node in await state.nodes()] == [0]

    world.run(main)


def test_reservations_end_by_themselves(world: World) -> None:
    async def main(state: ClusterState) -> None:
        await state.publish(news(queue_limit=1))
        assert await state.reserve("a", "r1", Demand(rank=8), None)
        await world.wait(0.5)

        async def ended() -> bool:
            none_held = [node.reserved for node in await state.nodes()] == [0]
            return none_held and (await state.table()).max_rank.max() == 0

        await until(ended)
        assert await state.reserve("a", "r2", Demand(), None)

    world.run(main, reservation_seconds=0.5)


def test_a_place_is_taken_only_by_who_has_seen_the_ones_before(world: World) -> None:
    async def main(state: ClusterState) -> None:
        await state.publish(news(queue_limit=9))
        table = await state.table()
        row = table.row("a")
        assert row is not None
        seen = int(table.generation[row])
        assert await state.reserve("a", "r1", Demand(rank=8, prompt_tokens=5, max_tokens=7, tpot=0.5), seen)
        assert not await state.reserve("a", "r2", Demand(), seen)
        table = await state.table()
        assert (table.max_rank[row], table.requests[row], table.tightest_tpot[row, STANDARD]) == (8, 1, 0.5)
        assert table.reservations(row) == {"r1": Demand(rank=8, prompt_tokens=5, max_tokens=7, tpot=0.5)}
        await state.publish(news(seq=2, queue_limit=9))
        assert await state.reserve("a", "r2", Demand(), int(table.generation[row]))

    world.run(main)


def test_a_new_process_has_no_reservations(world: World) -> None:
    async def main(state: ClusterState) -> None:
        await state.publish(news())
        await state.reserve("a", "r1", Demand(), None)
        await state.publish(news(epoch="2"))
        assert [node.reserved for node in await state.nodes()] == [0]
        assert await state.reserve("a", "r2", Demand(), None)
        assert await state.reserve("a", "r3", Demand(), None)

    world.run(main)


def test_nodes_are_bounded_and_forgotten(world: World) -> None:
    async def main(state: ClusterState) -> None:
        for node_id in "abc":
            await state.publish(news(id=node_id))
        with pytest.raises(TooManyNodes):
            await state.publish(news(id="d"))
        await world.wait(2.0)
        assert await state.publish(news(id="d")) == "taken"
        assert [node.record.id for node in await state.nodes()] == ["d"]

    world.run(main, max_nodes=3, forget_seconds=2.0)


def test_other_protocol_versions_are_refused(world: World) -> None:
    async def main(state: ClusterState) -> None:
        for v in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
            with pytest.raises(VersionMismatch, match=f"version {v}"):
                await state.publish(news(v=v))

    world.run(main)


class Reservations(RuleBasedStateMachine):
    """One live node, reserved by two states that share it, against a plain list of (request, end)."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}
        self.received = Received()
        self.world = world
        self.runner = asyncio.Runner()
        self.open: dict[str, float] = {}
        self.seq = 0
        self.queued = 0
        self.runner.run(self._begin())
        self.publish([], 0, 0)

    async def _begin(self) -> None:
        self.stack = AsyncExitStack()
        # Redis's clock can't be turned: there, nothing ends by itself.
        options = {"expiry": math.inf, "reservation_seconds": 600.0 if self.world.server else RESERVATION_SECONDS}
        states = [await self.stack.enter_async_context(self.world.open(**options)) for _ in range(2)]
        # Memory is one process's own.
        self.states = states if self.world.server else states[:1] * 2

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()

    @rule(acknowledged=st.lists(st.sampled_from("abcdef"), max_size=3), queued=st.integers(0, 4), by=st.integers(0, 1))
    def publish(self, acknowledged: list[str], queued: int, by: int) -> None:
        self.seq += 1
        self.queued = queued
        for name in acknowledged:
            self.received = self.received.with_one(self.numbers.get(name, 0))
        sent = news(seq=self.seq, queued=queued, queue_limit=4, received=self.received)
        assert self.runner.run(self.states[by].publish(sent)) == "taken"
        self.open = {name: end for name, end in self.open.items() if not self.received.has(self.numbers[name])}

    @rule(request=st.sampled_from("abcdef"), by=st.integers(0, 1))
    def reserve(self, request: str, by: int) -> None:
        live = {name: end for name, end in self.open.items() if end > self.world.clock.now}
        free = self.queued + len(live) < 4
        number = self.runner.run(self.states[by].reserve("a", request, Demand(), None))
        assert (number is not None) is free
        if number is not None:
            assert number > max(self.numbers.values(), default=0)
            self.numbers[request] = number
            self.open[request] = self.world.clock.now + RESERVATION_SECONDS

    @rule(request=st.sampled_from("abcdef"), by=st.integers(0, 1))
    def release(self, request: str, by: int) -> None:
        self.runner.run(self._see_all())  # who releases has reserved, and so knows of it
        self.runner.run(self.states[by].release("a", request))
        self.open.pop(request, None)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        if self.world.server is None:
            self.world.clock.now += seconds

    @invariant()
    def counts_agree(self) -> None:
        self.runner.run(self._see_all())

    async def _see_all(self) -> None:
        live = sum(end > self.world.clock.now for end in self.open.values())
        for state in self.states:
            await until(partial(self._sees, state, live))

    async def _sees(self, state: ClusterState, live: int) -> bool:
        return [node.reserved for node in await state.nodes()] == [live]


@pytest.mark.hypothesis
def test_drawn_reservations_in_memory() -> None:
    run_state_machine_as_test(lambda: Reservations(World(None)), settings=settings(stateful_step_count=20))


@pytest.mark.hypothesis
def test_drawn_reservations_in_redis(shared_redis: RedisServer) -> None:
    run_state_machine_as_test(
        lambda: Reservations(World(shared_redis)),
        settings=settings(max_examples=draws(10), stateful_step_count=15),
    )
