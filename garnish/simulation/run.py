"""What `garnish simulate` does, apart from reading options and writing lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from garnish.errors import FrontDoorError
from garnish.simulation.job import TraceRequest
from garnish.simulation.outcome import Summary
from garnish.simulation.plot import NoPlots
from garnish.simulation.plot import plot as draw
from garnish.simulation.policies import default_policy, policy_maker
from garnish.simulation.profile import NodeProfile, ProfileError, load_profile
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import Slo, SloError, parse_slo
from garnish.simulation.study import simulate, smallest_pool
from garnish.simulation.traces.errors import TraceError
from garnish.simulation.traces.laws import Laws
from garnish.simulation.traces.read import read_trace
from gateway.scheduling.policy import UnknownPolicy

Progress = Callable[[str], None]


class Plan:
    """A trace, a kind of node and a policy; `run` and `sweep` simulate."""

    def __init__(
        self, form: str, requests: list[TraceRequest], profile: NodeProfile, slo: Slo, policy: str, seed: int
    ) -> None:
        self._form, self._requests, self._profile, self._slo = form, requests, profile, slo
        self._policy, self._seed = policy, seed
        self._last: tuple[int, Simulator, Summary] | None = None
        self._sweep: dict[int, float] = {}

    def told(self) -> dict[str, Any]:
        """Returns, for display, what is simulated: the trace, profile, policy, SLO and seed."""
        bounds = {name: getattr(self._slo, name) for name in ("ttft", "tpot", "tpt")}
        stated = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in bounds.items() if value is not None)
        return {
            "simulated": True,
            "format": self._form,
            "requests": len(self._requests),
            "functions": len({request.function for request in self._requests}),
            "profile": self._profile.title,
            "source": self._profile.source,
            "policy": self._policy,
            "slo": f"SLO: {stated}",
            "seed": self._seed,
        }

    def run(self, nodes: int, progress: Progress) -> dict[str, Any]:
        summary = self._simulate(nodes, progress)
        return {"nodes": nodes, "summary": summary}

    def sweep(self, low: int, high: int, wanted: float, progress: Progress) -> dict[str, Any]:
        """Returns the smallest pool of `low` to `high` nodes with at least the `wanted` attainment (None: `high` are
        not enough), the pools that were looked at on the way, and the smallest one's summary."""

        def attainment(nodes: int) -> float:
            if nodes not in self._sweep:
                self._sweep[nodes] = self._simulate(nodes, progress).attainment
            return self._sweep[nodes]

        smallest = smallest_pool(attainment, low, high, wanted)
        if smallest is not None and (self._last is None or self._last[0] != smallest):
            self._simulate(smallest, progress)
        pools = [{"nodes": nodes, "attainment": self._sweep[nodes]} for nodes in sorted(self._sweep)]
        return {
            "smallest": smallest,
            "wanted": wanted,
            "high": high,
            "sweep": pools,
            "nodes": smallest,
            "summary": self._last[2] if self._last is not None and smallest is not None else None,
        }

    def plot(self, file: Path, wanted: float) -> None:
        """Draws the last run, and the sweep if there was one, into `file`. Raises FrontDoorError when that fails."""
        assert self._last is not None
        nodes, simulator, _ = self._last
        title = f"{nodes} nodes, {self._policy}, {self._profile.title}"
        try:
            draw(file, simulator, self._slo, self._sweep, wanted, title)
        except (NoPlots, ValueError, OSError) as error:
            raise FrontDoorError(f"the plot can't be drawn: {error}") from None

    def _simulate(self, nodes: int, progress: Progress) -> Summary:
        total = len(self._requests)
        progress(f"simulating {nodes} nodes")
        simulator, summary = simulate(
            self._requests,
            self._profile,
            nodes,
            self._policy,
            self._slo,
            self._seed,
            lambda placed: progress(f"simulating {nodes} nodes: {placed * 100 // total} % of {total} requests"),
        )
        self._last = nodes, simulator, summary
        return summary


def make_plan(trace: Path, laws: Laws, profile: str, slo: str, policy: str | None, seed: int) -> Plan:
    """Reads the trace, profile, SLO and policy that are named, and returns the plan. Raises FrontDoorError."""
    try:
        name = policy or default_policy()
        policy_maker(name, seed)
        node = load_profile(profile)
        bounds = parse_slo(slo, node)
        form, requests = read_trace(trace, laws)
    except (UnknownPolicy, ProfileError, SloError, TraceError) as error:
        raise FrontDoorError(str(error)) from None
    return Plan(form, requests, node, bounds, name, seed)
