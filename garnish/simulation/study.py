"""One run, and the search for the smallest pool that keeps the SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from garnish.simulation.job import TraceRequest
from garnish.simulation.outcome import Summary, summarise
from garnish.simulation.policies import policy_maker
from garnish.simulation.prepare import make_jobs
from garnish.simulation.profile import NodeProfile
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import Slo


def simulate(
    requests: Sequence[TraceRequest],
    profile: NodeProfile,
    nodes: int,
    policy: str,
    slo: Slo,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[Simulator, Summary]:
    """Simulates the requests on so many nodes, and returns the simulator at its end and a summary. Raises
    UnknownPolicy."""
    simulator = Simulator(profile, nodes, policy_maker(policy, seed), make_jobs(requests, profile, slo))
    simulator.run(progress)
    return simulator, summarise(simulator, slo)


def smallest_pool(attainment: Callable[[int], float], low: int, high: int, wanted: float) -> int | None:
    """Returns the least number of nodes with at least the `wanted` attainment; None when `high` are not enough. The
    search by bisection takes for granted that more nodes do no worse. `attainment` is asked about log2(high - low) + 2
    pools at most."""
    if attainment(high) < wanted:
        return None
    while low < high:
        middle = (low + high) // 2
        if attainment(middle) >= wanted:
            high = middle
        else:
            low = middle + 1
    return high
