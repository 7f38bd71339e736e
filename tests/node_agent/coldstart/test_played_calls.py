"""The planner's choices, played out over drawn calls against every plan forced: whatever workers and link are like, it
is slower than none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from node_agent.coldstart import planner
from tests.node_agent.coldstart.played_engine import LAYERS, Host, PlayedCall, PlayedEngine, Way

WORKER_S = (3e-5, 5.35e-6)
"""A layer of rank 64 on q, k and v, fixed and by token; the host's other costs are those of the same model, too."""
SLOWED = (1, 6, 24, 100)
LOAD_S = (2e-3, 5e-3, 1e-2, 2e-2)
SEEDS, CALLS, GAP_S = 5, 8, 0.38
SPREAD = 1.05
TRADED = 1.15
"""A first token may be later by this factor where whole answers end sooner by more."""


def never(_: planner.StepCosts) -> bool:
    return False


def full(costs: planner.ChunkCosts) -> int | None:
    chosen = planner.choose(costs)
    return None if chosen.name == "wait" else chosen.assisted


WAYS: dict[str, Callable[[], Way]] = {
    "overlap": lambda: Way(lambda _: None, never),
    "pipeline": lambda: Way(lambda _: 0, never),
    "assist": lambda: Way(lambda _: LAYERS, never),
}


def served(host: Host, way: Way) -> dict[str, float]:
    """Means over calls of several bursts: seconds to the first token, for each token, and to the end."""
    calls: list[PlayedCall] = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        due = np.cumsum(rng.exponential(GAP_S, CALLS))
        prompts, answers = rng.integers(4, 300, CALLS), np.minimum(rng.geometric(1 / 12, CALLS), 48)
        burst = [PlayedCall(float(d), int(p), int(a)) for d, p, a in zip(due, prompts, answers, strict=True)]
        PlayedEngine(host, way).serve(burst)
        calls += burst
    ends = [call.times[-1] - call.due for call in calls]
    return {
        "ttft": mean(call.times[0] - call.due for call in calls),
        "tpt": mean(end / call.answer for call, end in zip(calls, ends, strict=True)),
        "e2e": mean(ends),
    }


@pytest.mark.parametrize("load_s", LOAD_S)
@pytest.mark.parametrize("slowed", SLOWED)
def test_no_forced_plan_is_better(slowed: int, load_s: float) -> None:
    """But for what cold prompts win by overtaking decodes: no call needs to be faster than a warm one."""
    fixed, by_token = WORKER_S
    host = Host((1.25e-3, 5.2e-5), 0.156, (slowed * fixed, slowed * by_token), load_s)
    chosen, warm = served(host, Way(full, planner.joins)), served(replace(host, load=1e-9), WAYS["overlap"]())
    for name, way in WAYS.items():
        forced = served(host, way())
        spread = TRADED if chosen["e2e"] < forced["e2e"] / TRADED else SPREAD
        for kind, seconds in forced.items():
            assert chosen[kind] <= spread * max(seconds, warm[kind]), f"{kind}, {name}: {seconds}, {chosen[kind]}"


def test_what_is_played_adds_up() -> None:
    """One call alone, whose seconds can be counted on one's fingers."""
    host = Host((1.0, 0.0), 0.0, (1.0, 0.0), 2.0)

    def alone(way: Way) -> list[float]:
        call = PlayedCall(0.0, 7, 2)
        PlayedEngine(host, way).serve([call])
        return call.times

    assert alone(WAYS["overlap"]()) == pytest.approx([60 + 30, 60 + 30 + 30])
    assert alone(WAYS["pipeline"]()) == pytest.approx([60 + 1, 60 + 1 + 30])
    assert alone(WAYS["assist"]()) == pytest.approx([60, 60 + 30])  # two seconds a layer; all has come just then
    half = alone(Way(lambda _: 10, never))  # layers 10 to 29 come in 40 s; the workers need 20 s for the others
    assert half == pytest.approx([40 + 1, 60 + 30])
