"""The planner against a walk of each plan, layer by layer, in plain Python; decode rows against steps played out."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from node_agent.coldstart.planner import (
    JOINS_AT_MOST,
    NOT_WORTH,
    ChunkCosts,
    StepCosts,
    choose,
    forecast,
    joins,
    wait_seconds,
)

SECONDS = st.floats(0, 2, allow_nan=False, width=32)


@st.composite
def costs(draw: st.DrawFn) -> ChunkCosts:
    n = draw(st.integers(1, 12))
    per_layer = st.lists(SECONDS, min_size=n, max_size=n)
    return ChunkCosts(
        device=draw(st.floats(0.01, 2)),
        cpu=np.array(draw(st.one_of(per_layer, st.just([float("inf")] * n)))),
        load=np.array(draw(per_layer)),
        in_host=np.array(draw(st.one_of(st.just([0.0] * n), per_layer.map(lambda gaps: list(accumulate(gaps)))))),
        latency=draw(st.sampled_from([0.0, 0.1])),
        ahead=draw(st.sampled_from([0.0, 0.5, 5.0])),
        others=draw(st.sampled_from([0, 1, 3, 30])),
        apart=draw(st.sampled_from([0.0, 0.01, 1.0])),
        decodable=draw(st.sampled_from([0.0, 1.0, 10.0])),
    )


def walk(costs: ChunkCosts, assisted: int) -> float:
    """When the last layer is done, with layers assisted.. loaded first."""
    link, arrival = costs.latency, {}
    for layer in range(assisted, len(costs.load)):
        link = max(link, costs.in_host[layer]) + costs.load[layer]
        arrival[layer] = link
    now = costs.ahead
    for layer in range(len(costs.load)):
        if layer in arrival:
            now = max(now, arrival[layer]) + costs.device
        else:
            now = max(now, costs.in_host[layer]) + costs.cpu[layer]
    return now


@given(costs())
def test_a_forecast_is_the_walk_of_its_plan(costs: ChunkCosts) -> None:
    expected = [walk(costs, assisted) for assisted in range(len(costs.load) + 1)]
    np.testing.assert_allclose(forecast(costs), expected, rtol=1e-9)


def engine_waits(costs: ChunkCosts, assisted: int) -> float:
    """Seconds in which the engine stands still for workers, instead of serving another request."""
    return sum(max(0.0, costs.cpu[layer] - costs.device) for layer in range(assisted))


def lost_by_others(costs: ChunkCosts, name: str, assisted: int) -> float:
    """Seconds of all others together: only a chunk that waits joins their pass."""
    if name == "wait":
        return 0.0
    return costs.apart + costs.others * engine_waits(costs, assisted)


def brute_force(costs: ChunkCosts) -> list[tuple[str, int, float, float]]:
    """Every plan that can be: its name, assisted layers, end, and the time of all requests together."""
    plans = [("wait", 0, wait_seconds(costs))]
    plans += [("assist" if g else "pipeline", g, walk(costs, g)) for g in range(len(costs.load) + 1)]
    return [
        (name, g, end, max(end, costs.decodable) + lost_by_others(costs, name, g))
        for name, g, end in plans
        if np.isfinite(end)
    ]


@given(costs())
def test_no_better_plan_is_passed_over(costs: ChunkCosts) -> None:
    """Of those by which all requests together end first, the one whose chunk ends first."""
    chosen, close = choose(costs), NOT_WORTH * costs.device * len(costs.load)
    plans = brute_force(costs)
    least = min(together for *_, together in plans)
    (mine,) = [plan for plan in plans if plan[:2] == (chosen.name, chosen.assisted)]
    assert mine[2] == pytest.approx(chosen.seconds)
    assert mine[3] <= least + close + 1e-6
    assert chosen.seconds <= min(end for *_, end, together in plans if together <= least + 0.99 * close) + close + 1e-6
    assert chosen.exposed == pytest.approx(max(0.0, chosen.seconds - costs.ahead - costs.device * len(costs.load)))


@given(costs())
def test_no_plan_is_worse_than_the_pipeline_or_waiting(costs: ChunkCosts) -> None:
    """For all together, whatever the workers are like, and for the call itself unless it waits for the others' sake."""
    chosen, close = choose(costs), NOT_WORTH * costs.device * len(costs.load)
    of_name = {(name, g): (end, together) for name, g, end, together in brute_force(costs)}
    end, together = of_name[chosen.name, chosen.assisted]
    for name in ("wait", "pipeline"):
        if (name, 0) in of_name:
            assert together <= of_name[name, 0][1] + close + 1e-6
            assert end <= of_name[name, 0][0] + 2 * close + 1e-6 or (chosen.name == "wait" and costs.apart)


@given(costs())
def test_the_order_of_loading_has_every_layer_once(costs: ChunkCosts) -> None:
    layers = len(costs.load)
    chosen = choose(costs)
    order = chosen.order(layers)
    assert sorted(order) == list(range(layers))
    assert order == sorted(order[: layers - chosen.assisted]) + sorted(order[layers - chosen.assisted :])


def uniform(device: float, cpu: float, load: float, layers: int = 32) -> ChunkCosts:
    return ChunkCosts(device, np.full(layers, cpu), np.full(layers, load), np.zeros(layers))


def test_what_is_there_already_is_waited_for() -> None:
    assert choose(uniform(device=1e-3, cpu=1e-3, load=0.0)).name == "wait"


def test_a_fast_link_is_pipelined() -> None:
    assert choose(uniform(device=1e-3, cpu=5e-3, load=0.9e-3)).name == "pipeline"


def test_a_slow_link_is_assisted_until_both_end_together() -> None:
    """Half of the layers load while the CPU computes the other half as fast as the device would."""
    chosen = choose(uniform(device=1e-3, cpu=1e-3, load=2e-3, layers=32))
    assert (chosen.name, chosen.exposed) == ("assist", pytest.approx(0.0, abs=1e-9))
    assert 16 <= chosen.assisted <= 32


def test_what_loads_while_others_are_computed_needs_no_workers() -> None:
    load = uniform(device=1e-3, cpu=3e-3, load=2e-3, layers=32)
    assert choose(load).name == "assist"
    behind = choose(replace(load, ahead=64e-3))
    assert (behind.name, behind.exposed) == ("wait", pytest.approx(0.0, abs=1e-9))


def test_slow_workers_are_not_asked() -> None:
    assert choose(uniform(device=1e-3, cpu=1.0, load=2e-3)).name == "pipeline"
    assert choose(uniform(device=1e-3, cpu=float("inf"), load=2e-3)).name == "pipeline"


def test_workers_that_hold_up_many_are_asked_by_one_alone() -> None:
    """A layer on them takes twice a layer on the device, and a load twice that: for one call they are worth it."""
    slow = uniform(device=1e-3, cpu=2e-3, load=4e-3)
    assert choose(slow).name == "assist"
    assert choose(replace(slow, others=20)).name == "pipeline"
    assert choose(replace(uniform(device=1e-3, cpu=1e-3, load=4e-3), others=20)).name == "assist"  # they hold up nobody


def test_a_pass_of_its_own_is_worth_what_the_others_lose_by_it() -> None:
    fast = uniform(device=1e-3, cpu=float("inf"), load=1e-3)
    assert choose(replace(fast, apart=30e-3)).name == "pipeline"  # 31 ms sooner than by waiting
    assert choose(replace(fast, apart=32e-3)).name == "wait"


def test_a_first_token_before_others_is_no_gain_if_decoding_waits_for_the_load() -> None:
    """All end together no sooner, and the others later."""
    slow = replace(uniform(device=1e-3, cpu=2e-3, load=4e-3), others=1)
    assert choose(slow).name == "assist"
    assert choose(replace(slow, decodable=wait_seconds(slow))).name == "pipeline"
    assert choose(replace(slow, others=0, decodable=wait_seconds(slow))).name == "assist"  # it is no loss either


def played(step: StepCosts, join: bool, tokens: int) -> float:
    """Seconds, summed over all requests, until each has `tokens` more; the load never ends, or there would be no
    step."""
    longer, mine, now, done = step.longer if join else 0.0, tokens, 0.0, 0.0
    now += step.device + longer
    mine -= join
    done += step.others * (now + (tokens - 1) * step.device)
    return done + step.rows * (now + mine * step.device)


@given(
    st.floats(1e-3, 1.0),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(2, 9),
)
def test_rows_join_where_all_together_gain(
    device: float, longer: float, before: float, rows: int, others: int, tokens: int
) -> None:
    """Against both courses played out: rows that sit a step out decode from the next one on."""
    step = StepCosts(device, longer * device, before * device, 1e9, rows, others)
    gain = played(step, join=False, tokens=tokens) - played(step, join=True, tokens=tokens)
    within = longer + before <= JOINS_AT_MOST
    assume(abs(gain) > 1e-9 * device and abs(longer + before - JOINS_AT_MOST) > 1e-9)
    assert joins(step) == (gain > 0 and within)


def test_rows_alone_wait_for_no_more_than_their_load() -> None:
    alone = StepCosts(device=1.0, longer=3.0, before=0.0, left=4.0, rows=1, others=0)
    assert joins(alone)
    assert not joins(replace(alone, left=2.0))


def test_only_what_is_allowed_is_chosen() -> None:
    costs = uniform(device=1e-3, cpu=1e-3, load=2e-3)
    assert choose(costs, ("wait",)).name == "wait"
    assert choose(costs, ("pipeline",)).name == "pipeline"
    with pytest.raises(ValueError, match="assist"):
        choose(uniform(device=1e-3, cpu=float("inf"), load=2e-3), ("assist",))
