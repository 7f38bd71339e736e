"""The sweep on the real engine: it measures what it says, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.performance_fit import DecodeSample
from node_agent.performance.cases import (
    IDLE,
    LONG,
    Bounds,
    CaseRow,
    Effort,
    decode_cases,
    grid_cases,
    prefill_cases,
    row_contexts,
)
from node_agent.performance.sweep import SweepTooSlow, all_cases, bench
from tests.support.local_engine import MakeEngine

FEW = Effort((1, 3), (8, 16), 1, (8, 16), 2, 192)


def test_a_sweep_leaves_the_engine_as_it_was(make_engine: MakeEngine, stories_adapters: dict[str, Path]) -> None:
    engine = make_engine()
    adapter = engine.deploy(next(iter(stories_adapters.values())))
    story = [1, *range(60, 90)]
    fresh = engine.submit(story, 20, adapter, ignore_eos=True)
    engine.run()
    store = engine.engine.store
    resident, blocks = store.residents(), engine.engine.blocks.free
    steps: list[float] = []
    with bench(engine.engine, engine.base, FEW) as made:
        assert engine.engine.blocks.free < blocks
        assert {max(lease.ranks) for lease in made.leases} == {8, 16}
        assert len({lease.slot for lease in made.leases}) == 6
        cases = all_cases(FEW, made.bounds)
        found = made.measure(cases, FEW.rounds, lambda _, share: steps.append(share))
    assert len(found.decode) + len(found.prefill) == (FEW.rounds - 1) * len(cases), "the first passes do not count"
    assert all(sample.seconds > 0 for sample in [*found.decode, *found.prefill])
    assert {sample.rows for sample in found.decode} == {1, 3}
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] < 1
    assert (store.residents(), engine.engine.blocks.free, store.leases) == (resident, blocks, 0)
    again = engine.submit(story, 20, adapter, ignore_eos=True)
    engine.run()
    assert engine.outcomes[again].tokens == engine.outcomes[fresh].tokens


def test_a_sweep_that_has_no_time_is_given_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    blocks = engine.engine.blocks.free
    with (
        pytest.raises(SweepTooSlow, match="used up the time limit"),
        bench(engine.engine, engine.base, FEW, budget=0.0),
    ):
        pass
    with bench(engine.engine, engine.base, FEW) as made:
        made.deadline = 0.0
        with pytest.raises(SweepTooSlow, match="0 of"):
            made.measure(all_cases(FEW, made.bounds), 1)
        made.deadline = float("inf")
        alone = made.measure(all_cases(FEW, made.bounds), 1)
        assert len(alone.decode) + len(alone.prefill) == len(all_cases(FEW, made.bounds)), "there are no others"
    assert engine.engine.blocks.free == blocks


def test_measured_terms_are_those_of_the_case(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with bench(engine.engine, engine.base, FEW) as made:
        ranks = {case: [made.bounds.ranks[r.adapter] if r.adapter >= 0 else 0 for r in case.rows]
                 for case in decode_cases(FEW, made.bounds, 0)}  # fmt: skip
        for case, of_rows in ranks.items():
            sample = made.run(case)
            assert isinstance(sample, DecodeSample)
            adapters = {row.adapter for row in case.rows if row.adapter >= 0}
            assert sample.contexts == sum(row.context for row in case.rows)
            assert sample.request_ranks == sum(of_rows)
            assert sample.max_rank == len(of_rows) * max(of_rows)
            assert sample.adapter_ranks == sum(made.bounds.ranks[adapter] for adapter in adapters)


@pytest.mark.parametrize("effort", [IDLE, LONG], ids=["idle", "long"])
@pytest.mark.parametrize(("max_rows", "cache"), [(32, 100_000), (32, 600), (6, 5000), (1, 64), (2, 16), (4, 0)])
def test_cases_fit_into_the_node(effort: Effort, max_rows: int, cache: int) -> None:
    contexts = row_contexts(effort, max_rows, 500, cache, 16)
    assert sum(contexts) <= min(cache, effort.cache)
    assert len(contexts) <= max_rows
    assert contexts == sorted(contexts, reverse=True)
    assert all(context % 16 == 0 and 0 < context <= 500 for context in contexts)
    bounds = Bounds(64, tuple(contexts), (8, 16, 8, 64))
    cases = [*decode_cases(effort, bounds, 1), *prefill_cases(effort, bounds), *grid_cases((8, 64), bounds, 100)]
    assert bool(cases) == bool(contexts)
    for case in cases:
        assert 0 < len(case.rows) <= len(contexts)
        assert sum(row.length for row in case.rows) <= (max_rows if case.decode else 64)
        for row, context in zip(case.rows, contexts, strict=False):
            assert row.context >= 0 and row.context + row.length <= context
            assert -1 <= row.adapter < 4
            assert not case.decode or row.length == 1


def test_mixes() -> None:
    """Every rank alone and shared, all in turn, half of the rows without any, and none at all."""
    bounds = Bounds(64, (160,) * 4, (8, 64, 8, 64, 8, 64))
    cases = [case for case in decode_cases(IDLE, bounds, 0) if len(case.rows) == 4]
    adapters = [tuple(row.adapter for row in case.rows) for case in cases]
    assert adapters == [
        (-1, -1, -1, -1), (0, 2, 4, 0), (0, 0, 0, 0), (1, 3, 5, 1), (1, 1, 1, 1), (0, 1, 2, 3), (-1, 1, -1, 3),
    ]  # fmt: skip
    assert decode_cases(IDLE, bounds, 0) == decode_cases(IDLE, bounds, 0)
    without = Bounds(64, (160,) * 4, ())
    assert {row.adapter for case in decode_cases(IDLE, without, 0) for row in case.rows} == {-1}
    assert prefill_cases(IDLE, without)[0].rows == (CaseRow(0, 16, -1),)
