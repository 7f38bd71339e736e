"""Routing over a real cluster state: who is able, when places end, what is remembered of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_world import RECORD, REQUEST, ask, node, slow, table_of

from cluster.errors import ServiceError
from cluster.node_table import Demand
from cluster.state import MemoryClusterState
from gateway.scheduling.decision import MAX_CANDIDATES, Candidate
from gateway.scheduling.policy import POLICIES, make_policy
from gateway.scheduling.route import ATTEMPTS, Trace, eligible_nodes, reserve_route
from tests.support.listed_record import ListedRecord, full_news, put_record


async def state_of(*records: ListedRecord) -> MemoryClusterState:
    state = MemoryClusterState(lambda: 0.0)
    for record in records:
        assert await state.publish(full_news(record)) == "taken"
    return state


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_places_spread_and_end(policy: str) -> None:
    """Each node takes its queue's length, no node more, and then the answer is `overloaded`."""

    async def main() -> list[str]:
        state, chooser = await state_of(node("a", queue_limit=4), node("b", queue_limit=4)), make_policy(policy)
        routes = [(await reserve_route(state, chooser, "b", ask(id=str(index)))).node_id for index in range(8)]
        with pytest.raises(ServiceError) as caught:
            await reserve_route(state, chooser, "b", ask(id="9"))
        assert caught.value.type == "overloaded"
        return routes

    assert sorted(asyncio.run(main())) == ["a"] * 4 + ["b"] * 4


ABLE_NODES = st.builds(
    lambda state, base, context: {"state": state, "base": base, "max_context": context},
    st.sampled_from(["ready", "warming", "draining"]),
    st.sampled_from(["b", "c"]),
    st.sampled_from([0, 299, 300, 8192]),
)


@given(st.lists(ABLE_NODES, max_size=8), st.sets(st.sampled_from([str(index) for index in range(9)])))
def test_only_those_are_able_that_serve_the_model_and_have_the_context(
    drawn: list[dict[str, Any]], excluded: set[str]
) -> None:
    records = [msgspec.structs.replace(RECORD, id=str(index), **fields) for index, fields in enumerate(drawn)]
    table = table_of(*records)
    found = eligible_nodes(table, "b", REQUEST, frozenset(excluded)).tolist()
    assert found == [
        index
        for index, record in enumerate(records)
        if record.state == "ready" and record.base == "b" and record.max_context >= 300 and record.id not in excluded
    ]
    for row in table.rows():
        table.expire(row)
    assert eligible_nodes(table, "b", REQUEST, frozenset()).size == 0


LIMITS = st.lists(st.sampled_from([0, 8, 16, 64, 512]), max_size=6)


@given(LIMITS, st.sampled_from([0, 4, 8, 12, 64, 128]))
def test_nodes_take_adapters_up_to_the_rank_that_they_state(limits: list[int], rank: int) -> None:
    nodes = [msgspec.structs.replace(RECORD, id=str(index), rank_limit=limit) for index, limit in enumerate(limits)]
    request = msgspec.structs.replace(REQUEST, demand=msgspec.structs.replace(REQUEST.demand, rank=rank))
    found = eligible_nodes(table_of(*nodes), "b", request, frozenset()).tolist()
    assert found == [index for index, limit in enumerate(limits) if not limit or limit >= rank]


def test_a_node_that_changes_its_limit_is_seen_at_once() -> None:
    limited = msgspec.structs.replace(RECORD, rank_limit=8)
    request = msgspec.structs.replace(REQUEST, demand=msgspec.structs.replace(REQUEST.demand, rank=16))
    table = table_of(limited)
    assert not eligible_nodes(table, "b", request, frozenset()).size
    put_record(table, msgspec.structs.replace(limited, rank_limit=32))
    assert eligible_nodes(table, "b", request, frozenset()).size


def test_a_call_whose_rank_no_node_takes_says_so() -> None:
    async def main() -> None:
        state = await state_of(msgspec.structs.replace(RECORD, rank_limit=8, engine="vllm"))
        request = msgspec.structs.replace(REQUEST, demand=msgspec.structs.replace(REQUEST.demand, rank=16))
        with pytest.raises(ServiceError, match=r"of rank 16: the nodes that are ready take ranks up to 8 ") as caught:
            await reserve_route(state, make_policy("rank_aware"), "b", request)
        assert caught.value.type == "unavailable"

    asyncio.run(main())


def test_a_place_in_a_full_queue_is_taken_only_where_all_are_full() -> None:
    async def main() -> None:
        full, other = node("full", tier="device", queued=2, queue_limit=2), node("other", performance=slow(50.0))
        request, policy = ask(displaces=True), make_policy("rank_aware")
        assert (await reserve_route(await state_of(full, other), policy, "b", request)).node_id == "other"
        assert (await reserve_route(await state_of(full), policy, "b", request)).node_id == "full"
        with pytest.raises(ServiceError):
            await reserve_route(await state_of(full), policy, "b", REQUEST)

    asyncio.run(main())


def test_nobody_is_able() -> None:
    async def main() -> None:
        state = await state_of(RECORD)
        for base, request, excluded in [
            ("b", REQUEST, frozenset({"n"})),
            ("b", ask(max_tokens=8192), frozenset[str]()),
            ("c", REQUEST, frozenset[str]()),
        ]:
            trace = Trace()
            with pytest.raises(ServiceError) as caught:
                await reserve_route(state, make_policy("rank_aware"), base, request, excluded, trace)
            assert caught.value.type == "unavailable"
            assert trace.snapshot is None

    asyncio.run(main())


def test_strict_requests_are_told_when_to_come_back() -> None:
    async def main() -> None:
        state, trace = await state_of(node("a", *[8] * 32, tier="device", queued=30)), Trace()
        request = ask(ttft=0.1, slo_class="strict")
        with pytest.raises(ServiceError) as caught:
            await reserve_route(state, make_policy("rank_aware"), "b", request, trace=trace)
        assert (caught.value.type, caught.value.status) == ("overloaded", 429)
        assert caught.value.retry_after is not None and 1 < caught.value.retry_after <= 30
        assert trace.snapshot is not None and trace.snapshot.chosen is None
        (candidate,) = trace.snapshot.candidates(request)
        assert candidate.total is None and "a first token after" in candidate.broken[0]
        assert (await reserve_route(state, make_policy("rank_aware"), "b", ask(ttft=0.1))).node_id == "a"

    asyncio.run(main())


class PublishResult(MemoryClusterState):
    """A state where others take places at the same moment."""

    async def reserve(self, node_id: str, request_id: str, demand: Demand, expected_generation: int | None) -> bool:
        if request_id == "r":
            await super().reserve(node_id, f"other-{len(await self.nodes())}-{expected_generation}", demand, None)
        return await super().reserve(node_id, request_id, demand, expected_generation)


def test_a_place_that_others_change_is_chosen_anew_and_taken_at_last() -> None:
    async def main() -> None:
        state, trace = PublishResult(lambda: 0.0), Trace()
        for name in ("a", "b"):
            await state.publish(full_news(node(name, queue_limit=8)))
        route = await reserve_route(state, make_policy("rank_aware"), "b", REQUEST, trace=trace)
        assert trace.tries == ATTEMPTS
        assert route.forecast is not None and route.forecast > 0

    asyncio.run(main())


@pytest.mark.parametrize(("slo_class", "tries"), [("standard", 1), ("best_effort", 1), ("strict", ATTEMPTS)])
def test_the_only_node_is_not_chosen_anew(slo_class: str, tries: int) -> None:
    """But for a strict request, which might have to be refused now."""

    async def main() -> None:
        state, trace = PublishResult(lambda: 0.0), Trace()
        await state.publish(full_news(node("a", queue_limit=80)))
        await state.publish(full_news(node("full", queued=2, queue_limit=2)))
        request = ask(slo_class=slo_class)
        assert (await reserve_route(state, make_policy("rank_aware"), "b", request, trace=trace)).node_id == "a"
        assert trace.tries == tries

    asyncio.run(main())


def test_what_is_told_of_a_placement() -> None:
    async def main() -> list[Candidate]:
        now = 7.0
        state, trace = MemoryClusterState(lambda: now), Trace()
        await state.publish(full_news(node("cold")))
        await state.publish(full_news(node("warm", 16, tier="device")))
        await state.publish(full_news(node("promised", 16, tier="host", tightest_tpot=0.0303, performance=None)))
        now = 8.5
        route = await reserve_route(state, make_policy("rank_aware"), "b", REQUEST, trace=trace)
        assert trace.snapshot is not None
        told = trace.snapshot.candidates(REQUEST)
        assert route.forecast == told[0].ttft
        return told

    warm, cold, promised = asyncio.run(main())
    assert (warm.node, warm.chosen, warm.tier, warm.running, warm.model, warm.age) == (
        "warm",
        True,
        "device",
        1,
        "measured",
        1.5,
    )
    assert (cold.node, cold.chosen, cold.tier, cold.exposed_load) == ("cold", False, "absent", pytest.approx(0.226))
    assert (promised.total, promised.model, promised.model_problem) == (None, "assumed", None)
    assert warm.total is not None and cold.total is not None and warm.total < cold.total
    (why,) = promised.broken
    assert "another request's there" in why
    assert not warm.broken and warm.exposed_load == 0


def test_of_many_candidates_the_best_and_the_chosen_one_are_told() -> None:
    async def main(policy: str) -> None:
        state, trace = await state_of(*(node(f"n{index:02d}", *[8] * (index % 5)) for index in range(40))), Trace()
        route = await reserve_route(state, make_policy(policy), "b", REQUEST, trace=trace)
        assert trace.snapshot is not None
        told = trace.snapshot.candidates(REQUEST)
        assert len(told) == MAX_CANDIDATES and trace.snapshot.more == 40 - MAX_CANDIDATES
        assert [candidate.node for candidate in told if candidate.chosen] == [route.node_id]
        assert len({candidate.node for candidate in told}) == MAX_CANDIDATES
        best = sorted(candidate.running for candidate in told)
        assert best[:8] == [0] * 8
        assert (told[0].total is None) == (policy in ("random", "most_idle", "first_fit", "dlora"))

    for name in POLICIES:
        asyncio.run(main(name))


def test_rows_are_chosen_from_what_is_free() -> None:
    """Some rows are no candidates: columns and candidates must not slip against each other."""
    table = table_of(*(node(str(index), *[8] * (6 - index)) for index in range(6)))
    policy = make_policy("rank_aware")
    assert policy.choose(table, np.array([1, 3, 4]), ask(digest=None, rank=0)) == 4
    last = policy.last  # type: ignore[attr-defined]
    assert last.terms.requests.tolist() == [6, 4, 3]
