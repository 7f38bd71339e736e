"""Simulations of a trace with a policy, and the search for the smallest pool that meets the SLO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from garnish.errors import FrontDoorError
from garnish.simulation.job import Job, TraceRequest
from garnish.simulation.oracle import Oracle
from garnish.simulation.outcome import Summary, summarise, values
from garnish.simulation.profile import NodeProfile, ProfileError, load_profile
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import Slo, SloError, parse_slo
from garnish.simulation.traces.lines import TraceError
from garnish.simulation.traces.read import read_trace
from garnish.simulation.traces.requests import TraceOptions
from gateway.config import GatewayConfig
from gateway.scheduling.policy import POLICIES, Policy, UnknownPolicy, make_policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Clock = Callable[[], float]
SIMULATED: Mapping[str, Callable[[Clock], Policy]] = MappingProxyType({"oracle": Oracle})
STATED_TOKENS = 256
"""Default `max_tokens` of a call (docs/guide/invoke.md). A request of the trace with a longer answer must have stated a
larger value."""
Progress = Callable[[str], None]


def simulate(
    requests: Sequence[TraceRequest],
    profile: NodeProfile,
    nodes: int,
    policy: str,
    slo: Slo,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[Simulator, Summary]:
    """Simulates the requests, and returns the finished simulator and a summary. Raises UnknownPolicy."""
    simulator = Simulator(profile, nodes, policy_maker(policy, seed), make_jobs(requests, profile, slo))
    simulator.run(progress)
    return simulator, summarise(simulator, slo)


def smallest_pool(attainment: Callable[[int], float], low: int, high: int, target: float) -> int | None:
    """Returns the smallest number of nodes, from `low` to `high`, whose attainment is at least `target`.

    Returns None if even `high` nodes do not reach it. The bisection assumes that attainment does not fall with more
    nodes. `attainment` is called for at most log2(high - low) + 2 numbers of nodes.
    """
    if attainment(high) < target:
        return None
    while low < high:
        middle = (low + high) // 2
        if attainment(middle) >= target:
            high = middle
        else:
            low = middle + 1
    return high


def default_policy() -> str:
    """Returns the name of the gateway's default policy."""
    return str(next(field.default for field in msgspec.structs.fields(GatewayConfig) if field.name == "policy"))


def policy_names() -> list[str]:
    return sorted([*POLICIES, *SIMULATED])


def policy_maker(name: str, seed: int) -> Callable[[Clock], Policy]:
    """Returns a function that takes the simulation's clock and creates the policy `name`.

    Raises UnknownPolicy, whose message has the existing names.
    """
    if name in SIMULATED:
        return SIMULATED[name]
    if name not in POLICIES:
        raise UnknownPolicy(f"routing policy {name!r} does not exist; known: {', '.join(policy_names())}")
    return lambda clock: make_policy(name, clock, seed)


def make_jobs(requests: Sequence[TraceRequest], profile: NodeProfile, slo: Slo) -> list[Job]:
    """Returns the requests as jobs for nodes of `profile`, numbered in order."""
    return [
        Job(
            number=number,
            at=request.at,
            digest=request.function or None,
            rank=request.rank if request.function else 0,
            bytes=(request.bytes or request.rank * profile.bytes_per_rank) if request.function else 0,
            prompt=request.prompt_tokens,
            output=request.output_tokens,
            max_tokens=_stated(request, profile),
            tenant=request.tenant,
            function=request.function,
            ttft_slo=slo.ttft,
            tpot_slo=slo.per_token,
        )
        for number, request in enumerate(requests)
    ]


def _stated(request: TraceRequest, profile: NodeProfile) -> int:
    room = profile.max_context - request.prompt_tokens
    return max(request.output_tokens, min(STATED_TOKENS, room))


class Plan:
    """A trace, a node profile and a policy. `run` and `sweep` simulate them."""

    def __init__(
        self, form: str, requests: list[TraceRequest], profile: NodeProfile, slo: Slo, policy: str, seed: int
    ) -> None:
        self._form, self._requests, self._profile, self._slo = form, requests, profile, slo
        self._policy, self._seed = policy, seed
        self._last: tuple[int, Simulator, Summary] | None = None
        self._sweep: dict[int, float] = {}

    def describe(self) -> dict[str, Any]:
        """Returns the trace, profile, policy, SLO and seed, for display."""
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

    def sweep(self, low: int, high: int, target: float, progress: Progress) -> dict[str, Any]:
        """Searches for the smallest pool, from `low` to `high` nodes, whose attainment is at least `target`.

        The result has that pool (None if there is none), the attainment of all simulated pools, and the summary of the
        smallest one.
        """

        def attainment(nodes: int) -> float:
            if nodes not in self._sweep:
                self._sweep[nodes] = self._simulate(nodes, progress).attainment
            return self._sweep[nodes]

        smallest = smallest_pool(attainment, low, high, target)
        if smallest is not None and (self._last is None or self._last[0] != smallest):
            self._simulate(smallest, progress)
        pools = [{"nodes": nodes, "attainment": self._sweep[nodes]} for nodes in sorted(self._sweep)]
        return {
            "smallest": smallest,
            "wanted": target,
            "high": high,
            "sweep": pools,
            "nodes": smallest,
            "summary": self._last[2] if self._last is not None and smallest is not None else None,
        }

    def plot(self, file: Path, target: float) -> None:
        """Plots the last run, and the sweep if there was one, to `file`. Raises FrontDoorError."""
        assert self._last is not None
        nodes, simulator, _ = self._last
        title = f"{nodes} nodes, {self._policy}, {self._profile.title}"
        try:
            draw(file, simulator, self._slo, self._sweep, target, title)
        except ImportError:
            problem = "plots need matplotlib: pip install matplotlib, or leave --plot out"
            raise FrontDoorError(f"the plot can't be drawn: {problem}") from None
        except (ValueError, OSError) as error:
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
            lambda routed: progress(f"simulating {nodes} nodes: {routed * 100 // total} % of {total} requests"),
        )
        self._last = nodes, simulator, summary
        return summary


def make_plan(trace: Path, options: TraceOptions, profile: str, slo: str, policy: str | None, seed: int) -> Plan:
    """Reads the trace and the profile, checks the SLO and the policy, and returns the plan.

    Raises FrontDoorError.
    """
    try:
        name = policy or default_policy()
        policy_maker(name, seed)
        node = load_profile(profile)
        bounds = parse_slo(slo, node)
        form, requests = read_trace(trace, options)
    except (UnknownPolicy, ProfileError, SloError, TraceError) as error:
        raise FrontDoorError(str(error)) from None
    return Plan(form, requests, node, bounds, name, seed)


def draw(file: Path, simulator: Simulator, slo: Slo, sweep: Mapping[int, float], target: float, title: str) -> None:
    """Plots the distributions of TTFT and TPT, and the attainment by number of nodes of a `sweep`, to `file`.

    The file's suffix determines the format. Raises ImportError, ValueError, OSError.
    """
    from matplotlib.figure import Figure  # which the service does not need

    figure = Figure(figsize=(5 * (3 if sweep else 2), 4), layout="constrained")
    axes = figure.subplots(1, 3 if sweep else 2)
    for axis, measure, bound in zip(axes, ("ttft", "tpt"), (slo.ttft, slo.tpt), strict=False):
        _cumulative(axis, values(simulator.jobs, measure, simulator.profile.overhead), bound)
        axis.set_xlabel(f"{measure.upper()}, ms")
    axes[0].set_ylabel("share of requests")
    if sweep:
        axes[2].plot(sorted(sweep), [sweep[nodes] for nodes in sorted(sweep)], marker="o")
        axes[2].axhline(target, linestyle="--", color="grey")
        axes[2].set_xlabel("nodes")
        axes[2].set_ylabel("SLO attainment")
    figure.suptitle(f"Simulated: {title}")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _cumulative(axis: Axes, times: np.ndarray, bound: float | None) -> None:
    if times.size:
        axis.plot(times * 1e3, np.arange(1, times.size + 1) / times.size)
        axis.set_xscale("log")
    if bound is not None:
        axis.axvline(bound * 1e3, linestyle="--", color="grey")
    axis.set_ylim(0, 1)
