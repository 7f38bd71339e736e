"""The planner against a walk of each plan, layer by layer, in plain Python; decode rows against steps played out."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from node_agent.coldstart.planner import (
    MAX_JOIN_SHARE,
    NOT_WORTH,
    ChunkCosts,
    DecodeCosts,
    StepCosts,
    answer_ends,
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
        other_requests=draw(st.sampled_from([0, 1, 3, 30])),
        apart=draw(st.sampled_from([0.0, 0.01, 1.0])),
        results=draw(st.one_of(st.none(), per_layer.map(np.array))),
        decode=draw(st.one_of(st.none(), decodes())),
    )


@st.composite
def decodes(draw: st.DrawFn) -> DecodeCosts:
    longer = draw(st.sampled_from([0.0, 0.1, 3.0, float("inf")]))
    return DecodeCosts(draw(st.integers(1, 12)), draw(st.floats(0.01, 2)), longer, draw(st.sampled_from([0.0, 0.005])))


def results_of(costs: ChunkCosts, assisted: int) -> float:
    """Seconds by which the results of the assisted layers that are still to be loaded delay the load."""
    if costs.results is None:
        return 0.0
    return sum(float(costs.results[layer]) for layer in range(assisted) if costs.load[layer] > 0)


def arrivals(costs: ChunkCosts, assisted: int) -> dict[int, float]:
    """When each layer is on the device, with layers assisted.. loaded first."""
    link = (costs.latency if costs.load.any() else 0.0) + results_of(costs, assisted)
    found = {}
    for layer in [*range(assisted, len(costs.load)), *range(assisted)]:
        link = max(link, costs.in_host[layer]) + costs.load[layer]
        found[layer] = link
    return found


def walk(costs: ChunkCosts, assisted: int) -> float:
    """When the last layer is done, with layers assisted.. loaded first."""
    arrival = {layer: at for layer, at in arrivals(costs, assisted).items() if layer >= assisted}
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
    done, loaded = forecast(costs)
    np.testing.assert_allclose(done, expected, rtol=1e-9)
    last = [max(arrivals(costs, assisted).values()) for assisted in range(len(costs.load) + 1)]
    assert (loaded >= np.array(last) - 1e-9).all()  # those of the first group wait for the slowest of them
    if not costs.in_host.any():
        np.testing.assert_allclose(loaded, last, rtol=1e-9)


@given(decodes(), st.floats(0, 10), st.floats(0, 10))
def test_an_answer_ends_when_its_steps_played_out_do(decode: DecodeCosts, first: float, loaded: float) -> None:
    """Each step before the adapter is there either waits for it or takes longer, whichever ends the answer first."""
    (found,) = answer_ends(np.array([first]), np.array([loaded]), decode)
    now, left = first, loaded
    for _ in range(decode.tokens):
        if now < left:
            now, left = now + decode.longer, left + decode.results
        now += decode.step
    joined = now - decode.tokens * decode.step
    assert found <= max(first, loaded) + 1e-9
    if np.isfinite(decode.longer) and joined < max(first, loaded):
        assert (
            found <= joined + decode.longer + 1e-9 and found >= min(joined, max(first, loaded)) - decode.longer - 1e-9
        )
    if not np.isfinite(decode.longer):
        assert found == max(first, loaded)


def engine_waits(costs: ChunkCosts, assisted: int) -> float:
    """Seconds in which the engine stands still for workers, instead of serving another request."""
    return sum(max(0.0, costs.cpu[layer] - costs.device) for layer in range(assisted))


def lost_by_others(costs: ChunkCosts, name: str, assisted: int) -> float:
    """Seconds of all others together: only a chunk that waits joins their pass."""
    if name == "wait":
        return 0.0
    return costs.apart + costs.other_requests * engine_waits(costs, assisted)


def answer_end(costs: ChunkCosts, end: float, assisted: int) -> float:
    loaded = forecast(costs)[1][assisted]
    return float(answer_ends(np.array([end]), np.array([loaded]), costs.decode)[0])


def brute_force(costs: ChunkCosts) -> list[tuple[str, int, float, float]]:
    """Every plan that can be: its name, assisted layers, end, and the time of all requests together."""
    plans = [("wait", 0, wait_seconds(costs))]
    plans += [("assist" if g else "pipeline", g, walk(costs, g)) for g in range(len(costs.load) + 1)]
    return [
        (name, g, end, answer_end(costs, end, g) + lost_by_others(costs, name, g))
        for name, g, end in plans
        if np.isfinite(end)
    ]


def best(costs: ChunkCosts, plans: list[tuple[str, int, float, float]]) -> tuple[str, int, float, float]:
    """Of the plans by which all requests together end first, the one whose chunk ends first."""
    close = NOT_WORTH * costs.device * len(costs.load)
    least = min(together for *_, together in plans)
    return min((plan for plan in plans if plan[3] <= least + close), key=lambda plan: plan[2])


@given(costs())
def test_no_better_plan_is_passed_over(costs: ChunkCosts) -> None:
    chosen, close = choose(costs), NOT_WORTH * costs.device * len(costs.load)
    plans = brute_force(costs)
    of_kind = [plan for plan in plans if (plan[0] == "assist") == (chosen.name == "assist")]
    (mine,) = [plan for plan in plans if plan[:2] == (chosen.name, chosen.assisted)]
    assert mine[2] == pytest.approx(chosen.seconds)
    assert mine[3] <= best(costs, of_kind)[3] + 2 * close + 1e-6
    assert mine[2] <= best(costs, of_kind)[2] + close + 1e-6
    assert chosen.exposed == pytest.approx(max(0.0, chosen.seconds - costs.ahead - costs.device * len(costs.load)))


@given(costs())
def test_assist_replaces_what_it_beats_for_the_call_and_for_all(costs: ChunkCosts) -> None:
    chosen, close = choose(costs), NOT_WORTH * costs.device * len(costs.load)
    plans = brute_force(costs)
    plain = best(costs, [plan for plan in plans if plan[0] != "assist"])
    assisted = [plan for plan in plans if plan[0] == "assist"]
    if chosen.name == "assist":
        (mine,) = [plan for plan in assisted if plan[1] == chosen.assisted]
        assert mine[2] <= plain[2] + close and mine[3] <= plain[3] + close + 1e-6
    elif assisted:
        mine = best(costs, assisted)
        assert mine[2] + 3 * close + 1e-6 >= plain[2] or mine[3] + close + 1e-6 >= plain[3]


@given(costs(), st.floats(0, 0.5), st.floats(0, 0.5))
def test_bounds_that_overlap_keep_the_plain_plan(costs: ChunkCosts, low: float, high: float) -> None:
    def spread(_: str, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (1 - low) * seconds, seconds, (1 + high) * seconds

    chosen, certain = choose(costs, bounds=spread), choose(costs)
    if chosen.name == "assist":
        assert certain.name == "assist"
        plain = choose(costs, ("wait", "pipeline"))
        ahead = costs.ahead
        assert (1 + high) * (chosen.seconds - ahead) < (1 - low) * (plain.seconds - ahead)
    else:
        assert chosen == replace(choose(costs, ("wait", "pipeline")), undecided=certain.name == "assist")


@given(costs())
def test_no_plan_is_worse_than_the_pipeline_or_waiting(costs: ChunkCosts) -> None:
    """For all together, whatever the workers are like, and for the call itself unless it waits for the others' sake."""
    chosen, close = choose(costs), NOT_WORTH * costs.device * len(costs.load)
    of_name = {(name, g): (end, together) for name, g, end, together in brute_force(costs)}
    end, together = of_name[chosen.name, chosen.assisted]
    for name in ("wait", "pipeline"):
        if (name, 0) in of_name:
            assert together <= of_name[name, 0][1] + close + 1e-6
            waits = chosen.name == "wait" and (costs.apart or costs.decode is not None)
            assert end <= of_name[name, 0][0] + 2 * close + 1e-6 or waits


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
    assert choose(replace(slow, other_requests=20)).name == "pipeline"
    assert (
        choose(replace(uniform(device=1e-3, cpu=1e-3, load=4e-3), other_requests=20)).name == "assist"
    )  # they hold up nobody


def test_a_pass_of_its_own_is_worth_what_the_others_lose_by_it() -> None:
    fast = uniform(device=1e-3, cpu=float("inf"), load=1e-3)
    assert choose(replace(fast, apart=30e-3)).name == "pipeline"  # 31 ms sooner than by waiting
    assert choose(replace(fast, apart=32e-3)).name == "wait"


def test_a_first_token_before_others_is_no_gain_if_decoding_waits_for_the_load() -> None:
    """All end together no sooner, and the others later."""
    slow = replace(uniform(device=1e-3, cpu=2e-3, load=4e-3), other_requests=1)
    assert choose(slow).name == "assist"
    waits = DecodeCosts(tokens=8, step=32e-3, longer=float("inf"))
    assert choose(replace(slow, decode=waits)).name == "pipeline"
    assert choose(replace(slow, other_requests=0, decode=waits)).name == "assist"  # it is no loss either


def test_results_that_delay_the_load_lose_the_answer() -> None:
    """The first token comes sooner, but the tokens that follow it wait for a load that ends later."""
    waits = DecodeCosts(tokens=8, step=32e-3, longer=float("inf"))
    slow = replace(uniform(device=1e-3, cpu=2e-3, load=4e-3), decode=waits, results=np.full(32, 2e-3))
    assert choose(replace(slow, decode=None)).name == "assist"
    assert choose(slow).name == "pipeline"
    assert choose(replace(slow, decode=replace(waits, longer=1e-4))).name == "assist"  # the steps need not wait


def played(step: StepCosts, join: bool, tokens: int) -> float:
    """Seconds, summed over all requests, until each has `tokens` more; the load never ends, or there would be no
    step."""
    longer, mine, now, done = step.longer if join else 0.0, tokens, 0.0, 0.0
    now += step.device + longer
    mine -= join
    done += step.other_requests * (now + (tokens - 1) * step.device)
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
    device: float, longer: float, before: float, rows: int, other_requests: int, tokens: int
) -> None:
    """Against both courses played out: rows that sit a step out decode from the next one on."""
    step = StepCosts(device, longer * device, before * device, 1e9, rows, other_requests)
    gain = played(step, join=False, tokens=tokens) - played(step, join=True, tokens=tokens)
    within = longer + before <= MAX_JOIN_SHARE
    assume(abs(gain) > 1e-9 * device and abs(longer + before - MAX_JOIN_SHARE) > 1e-9)
    assert joins(step) == (gain > 0 and within)


def test_rows_alone_join_if_that_is_sooner_than_their_load() -> None:
    alone = StepCosts(device=1.0, longer=3.0, before=0.0, load_left=4.0, rows=1, other_requests=0)
    assert joins(alone)
    assert not joins(replace(alone, results=1.5))
    assert not joins(replace(alone, load_left=2.0))


def test_only_what_is_allowed_is_chosen() -> None:
    costs = uniform(device=1e-3, cpu=1e-3, load=2e-3)
    assert choose(costs, ("wait",)).name == "wait"
    assert choose(costs, ("pipeline",)).name == "pipeline"
    with pytest.raises(ValueError, match="assist"):
        choose(uniform(device=1e-3, cpu=float("inf"), load=2e-3), ("assist",))
