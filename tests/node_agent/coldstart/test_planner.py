"""The planner against a walk of each plan, layer by layer, in plain Python."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.coldstart.planner import NOT_WORTH, ChunkCosts, choose, forecast, wait_seconds

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


@given(costs())
def test_no_plan_that_ends_sooner_is_passed_over(costs: ChunkCosts) -> None:
    chosen = choose(costs)
    may_wait = [] if costs.ahead else [wait_seconds(costs)]
    ends = [*may_wait, *(walk(costs, assisted) for assisted in range(len(costs.load) + 1))]
    assert chosen.seconds <= min(ends) + 2 * NOT_WORTH * costs.device * len(costs.load) + 1e-9
    if chosen.name != "wait":
        assert chosen.seconds == pytest.approx(walk(costs, chosen.assisted))
    assert chosen.exposed == pytest.approx(max(0.0, chosen.seconds - costs.ahead - costs.device * len(costs.load)))


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
    assert (behind.name, behind.exposed) == ("pipeline", pytest.approx(0.0, abs=1e-9))


def test_slow_workers_are_not_asked() -> None:
    assert choose(uniform(device=1e-3, cpu=1.0, load=2e-3)).name == "pipeline"
    assert choose(uniform(device=1e-3, cpu=float("inf"), load=2e-3)).name == "pipeline"


def test_only_what_is_allowed_is_chosen() -> None:
    costs = uniform(device=1e-3, cpu=1e-3, load=2e-3)
    assert choose(costs, ("wait",)).name == "wait"
    assert choose(costs, ("pipeline",)).name == "pipeline"
    with pytest.raises(ValueError, match="assist"):
        choose(uniform(device=1e-3, cpu=float("inf"), load=2e-3), ("assist",))
