"""Tenants share a node's batch by their weights, whatever each of them sends; none waits for ever."""

from __future__ import annotations

from collections import Counter

from cluster.fair_shares import token_cost
from cluster.node_table import ASSUMED
from node_agent.engine.stats import stats_of
from node_agent.ipc import Finished
from node_agent.performance.drift import Drift
from tests.support.local_engine import LocalEngine, MakeEngine

STORY = [1, 403, 407, 261]


def ended(engine: LocalEngine, request: str) -> Finished:
    finished = engine.outcomes[request].finished
    assert finished is not None
    return finished


def order_of_first_tokens(engine: LocalEngine, requests: list[str]) -> list[str]:
    return sorted(requests, key=lambda request: engine.outcomes[request].times[0])


def test_a_backlogged_batch_is_shared_by_weight(make_engine: MakeEngine) -> None:
    """Three tenants with far more requests than rows: what each has had follows its weight within one request."""
    engine = make_engine(max_rows=4, queue_limit=400)
    weights, lengths = {"heavy": 3.0, "light": 1.0, "long": 1.0}, {"heavy": 6, "light": 6, "long": 24}
    owner = {}
    for tenant, weight in weights.items():
        for _ in range(120):
            request = engine.submit(STORY, lengths[tenant], tenant=tenant, weight=weight, ignore_eos=True)
            owner[request] = tenant

    def served() -> Counter[str]:
        sums: Counter[str] = Counter()
        for request, tenant in owner.items():
            outcome = engine.outcomes[request]
            if outcome.admitted:
                sums[tenant] += token_cost(len(STORY), len(outcome.tokens), 0)  # type: ignore[assignment]
        return sums

    engine.run(until=lambda: sum(served().values()) > 2500)
    per_weight = {tenant: served()[tenant] / weight for tenant, weight in weights.items()}
    bound = 2 * max(len(STORY), 2 * 4 * (len(STORY) + max(lengths.values())))
    assert max(per_weight.values()) - min(per_weight.values()) <= bound
    assert all(any(r.tenant == tenant for r in engine.engine.queue) for tenant in weights), "all were backlogged"
    for request in owner:
        engine.engine.cancel(request)


def test_a_newcomer_does_not_wait_for_a_flood(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=2)
    flood = [engine.submit(STORY, 8, tenant="flood", ignore_eos=True) for _ in range(40)]
    engine.run(until=lambda: sum(engine.outcomes[r].finished is not None for r in flood) >= 4)
    late = engine.submit(STORY, 8, tenant="late", ignore_eos=True)
    before = sum(bool(engine.outcomes[r].tokens) for r in flood)
    engine.run(until=lambda: bool(engine.outcomes[late].tokens))
    assert sum(bool(engine.outcomes[r].tokens) for r in flood) - before <= 2
    engine.run()
    assert all(ended(engine, r).reason == "length" for r in flood)


def test_functions_of_a_tenant_take_turns(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=1)
    many = [engine.submit(STORY, 4, function="many", ignore_eos=True) for _ in range(10)]
    few = [engine.submit(STORY, 4, function="few", ignore_eos=True) for _ in range(3)]
    engine.run()
    order = order_of_first_tokens(engine, many + few)
    assert max(order.index(request) for request in few) <= 6


def test_who_was_promised_more_comes_first_within_a_function(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=1)
    slow = [engine.submit(STORY, 4, ttft=60.0) for _ in range(3)]
    quick = engine.submit(STORY, 4, ttft=0.5)
    engine.run()
    assert order_of_first_tokens(engine, [*slow, quick])[0] == quick


def test_a_row_is_kept_for_a_tenant_that_has_none(make_engine: MakeEngine) -> None:
    """Of one that called lately; its next call then waits for no row of the flood's."""
    engine = make_engine(max_rows=8)
    engine.submit(STORY, 1, tenant="victim")
    engine.run()
    flood = [engine.submit(STORY, 100, tenant="flood", ignore_eos=True) for _ in range(30)]
    engine.run(until=lambda: len(engine.outcomes[flood[0]].tokens) > 3)
    assert len(engine.engine.running) == 7
    call = engine.submit(STORY, 2, tenant="victim", ignore_eos=True)
    engine.step()
    assert engine.outcomes[call].admitted
    engine.run(until=lambda: engine.outcomes[call].finished is not None)
    for request in flood:
        engine.engine.cancel(request)
    alone = [engine.submit(STORY, 20, tenant="victim", ignore_eos=True) for _ in range(9)]
    engine.engine.scheduler.callers._tenants.pop("flood")
    engine.step()
    assert len(engine.engine.running) == 8, "nothing is kept for those who don't call"
    for request in alone:
        engine.engine.cancel(request)


def test_a_full_queue_makes_room_for_who_has_less_in_it(make_engine: MakeEngine) -> None:
    """The newest of the tenant with most waiting goes, and its caller may try again."""
    engine = make_engine(max_rows=1, queue_limit=4)
    flood = [engine.submit(STORY, 4, tenant="flood", ignore_eos=True) for _ in range(6)]
    engine.book()
    assert [ended(engine, r).error_type for r in flood[4:]] == ["overloaded"] * 2
    other = engine.submit(STORY, 4, tenant="other", ignore_eos=True)
    engine.book()
    assert ended(engine, flood[3]).error_type == "overloaded"
    second = engine.submit(STORY, 4, tenant="other", ignore_eos=True)
    engine.book()
    assert ended(engine, flood[2]).error_type == "overloaded"
    third = engine.submit(STORY, 4, tenant="other", ignore_eos=True)
    engine.book()
    assert ended(engine, third).error_type == "overloaded", "both have two"
    engine.run()
    assert all(ended(engine, r).reason == "length" for r in (*flood[:2], other, second))


def test_shares_begin_anew_when_the_node_has_been_idle(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit(STORY, 50, tenant="greedy", ignore_eos=True)
    engine.run()
    shares = engine.engine.queue.shares
    assert (shares.tenant("greedy"), shares.function("greedy", "")) == (0.0, 0.0)


def test_the_tightest_promise_is_one_that_can_be_kept(make_engine: MakeEngine) -> None:
    """A time between tokens that is shorter than any step here would hide the others."""
    engine = make_engine(max_rows=1)
    engine.engine.drift = Drift(ASSUMED)
    for tpot in (0.5, 0.001, 0.06):
        engine.submit(STORY, 4, tpot=tpot)
    assert stats_of(engine.engine).tightest_tpot == 0.06
    engine.engine.drift = None
    assert stats_of(engine.engine).tightest_tpot == 0.001
    engine.run()
