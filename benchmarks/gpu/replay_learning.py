"""A node that begins without one measured pass and learns, simulated with fixed costs: each plan's passes take
fixed + slope * forecast seconds, exactly.

Calls come one at a time, of kinds drawn with Zipf's weights. The node is idle after every IDLE_EVERY calls and measures
one kind that it asked for, ROUNDS passes of each plan, as production does; passes that are served are learnt from, but
for those that wait for the whole adapter, which production does not time.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from benchmarks.gpu.replayed_node import PLANS, Call, ReplayedNode, profile_at
from node_agent.coldstart.pass_times import ROUNDS, PassSample

COSTS = {"wait": (0.0073, 0.95), "pipeline": (0.0071, 0.92), "assist": (0.016, 1.4)}
"""True fixed seconds and slopes: about those that fits of gpu_suite have; of the plain plans at the link's own rate,
which hides nothing of an error, of `assist` at 1 GB/s."""
NODES = ((None, False), (None, True), (1.0, True), (4.0, True))
"""Link rate in GB/s, None: its own; and whether there are CPU workers, which a GPU node has not by default."""
KINDS = tuple(Call(rank, tokens) for rank, tokens in product((32, 64, 128, 256), (64, 256, 512, 1024)))
CALLS, QUICK_CALLS = 400, 160
IDLE_EVERY = 4


class LearningNode:
    """A node and what its calls cost in truth."""

    def __init__(self, node: ReplayedNode) -> None:
        self.node = node
        self.forecasts = {(call, plan): node.forecast(call, plan) for call, plan in product(KINDS, PLANS)}
        """forecast of the best plan of each name by the profile alone; 0: not possible"""
        self.assisted_unmeasured = 0
        """assisted calls of kinds that were not measured"""

    def serve(self, call: Call) -> float:
        """Serves a call by the node's own plan. Returns its regret."""
        starts, kind = self.node.starts, self.node.kind(call)
        was_measured = starts.times.is_measured(kind)
        plan = self.node.plan(call)
        self.assisted_unmeasured += plan.name == "assist" and not was_measured
        seconds = self._seconds(plan.name, plan.by_profile)
        if plan.name != "wait":
            starts.times.add(PassSample(kind, plan.name, plan.by_profile, seconds))
        return seconds / self.best_s(call) - 1

    def best_s(self, call: Call) -> float:
        """Returns the seconds of the call by the best of all plans."""
        possible = [(plan, self.forecasts[call, plan]) for plan in PLANS]
        return min(self._seconds(plan, forecast) for plan, forecast in possible if forecast)

    def measure(self) -> None:
        """Measures one of the kinds that the planner asked for, if there are any."""
        starts = self.node.starts
        kind = next(iter(starts.unmeasured), None)
        if kind is None:
            return
        del starts.unmeasured[kind]
        (call,) = (call for call in KINDS if self.node.kind(call) == kind)
        for _, plan in product(range(ROUNDS), PLANS):
            forecast = self.forecasts[call, plan]
            starts.times.add(PassSample(kind, plan, forecast, self._seconds(plan, forecast)))

    def _seconds(self, plan: str, forecast: float) -> float:
        fixed, slope = COSTS[plan]
        return fixed + slope * forecast


def regrets(node: LearningNode, calls: int, rng: np.random.Generator) -> tuple[list[float], int]:
    """Returns the regret of each call, and the number of calls before the last measurement."""
    weights = 1 / np.arange(1, len(KINDS) + 1)
    order = rng.permutation(len(KINDS))
    lost, measured_at = list[float](), 0
    for number, at in enumerate(rng.choice(len(KINDS), calls, p=weights / weights.sum()), 1):
        lost.append(node.serve(KINDS[order[at]]))
        if number % IDLE_EVERY == 0 and node.node.starts.unmeasured:
            node.measure()
            measured_at = number
    return lost, measured_at


def learning_rows(profile: dict[str, Any], workers: int, quick: bool, seed: int) -> list[dict[str, Any]]:
    """Returns a row for each of NODES."""
    rows = []
    for rate, assisted in NODES:
        count = workers if assisted else 0
        node = LearningNode(ReplayedNode(profile_at(profile, rate), count))
        each, measured_at = regrets(node, QUICK_CALLS if quick else CALLS, np.random.default_rng(seed))
        running_mean = np.cumsum(each) / np.arange(1, len(each) + 1)
        row = {
            "part": "learning", "gb_s": rate, "workers": count, "calls": len(each), "measured_at": measured_at,
            "assisted_unmeasured": node.assisted_unmeasured,
            "learning_regret": round(float(np.mean(each[:measured_at] or [0.0])), 4),
            "learnt_regret": round(float(np.mean(each[min(measured_at, len(each) - 1) :])), 4),
            "regret_by_call": running_mean[9::10].round(4).tolist(),
        }  # fmt: skip
        rows.append(row)
    return rows
