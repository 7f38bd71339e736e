"""Chooses how a cold chunk gets its weights (Toppings 4.1): wait, pipeline, or assist + pipeline. Also decides whether
rows of a loading adapter join a decode step.

A forecast visits each of the N layers once, for all possible numbers g of assisted layers at the same time. Layers
g..N-1 are loaded in order while CPU workers compute the LoRA terms of layers 0..g-1, which are loaded last. With g = 0
this is the pipeline without CPU workers. `wait` stalls until the whole adapter has arrived. The workers' results share
the link with the weights, so each assisted layer delays the load.

While a pass waits for bytes, the engine serves other requests; while it waits for workers, the engine stalls and all
requests wait. Only a chunk that waits for its whole adapter joins the other requests' pass. Any other chunk has a
separate pass, which reads the base's weights once more. Choices therefore minimise the total time of all requests: the
chunk's own, and what each other request loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

NOT_WORTH = 0.01
"""Minimum gain for which a more complex plan is chosen, as a share of a warm prefill's duration."""
MAX_JOIN_SHARE = 0.25
"""Maximum extra duration of a decode step due to all joined rows together, as a share of the step without them. A
joined row is one whose adapter is still loading."""
PLANS = ("wait", "pipeline", "assist")
"""Names of the plans, simplest first."""

Bounds = Callable[[str, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Function of (plan, forecast seconds of whole passes) that returns lower bounds, likely values and upper bounds."""


def exact(_: str, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the forecast itself as all three bounds."""
    return seconds, seconds, seconds


@dataclass(frozen=True)
class Contention:
    """Other work of the engine while a cold chunk is computed."""

    ahead: float = 0.0
    """seconds that earlier cold chunks still need before this chunk is computed"""
    other_requests: int = 0
    ready: int = 0
    """number of other requests whose adapters are on the device"""
    decodes: int = 0
    """expected number of tokens that the request decodes after the chunk"""


@dataclass(frozen=True)
class DecodeCosts:
    """Costs of the decode steps that follow a chunk; times in seconds."""

    tokens: int
    """expected number of steps"""
    step: float
    """duration of one step with the adapter on the device"""
    longer: float
    """extra seconds of a step that the request's row joins while its adapter is still loading; inf if it can't join"""
    results: float = 0.0
    """seconds by which the workers' results for one joined step delay the load"""


@dataclass(frozen=True)
class ChunkCosts:
    """Costs of one chunk of one adapter, in seconds."""

    device: float
    """seconds of one layer on the device, including its LoRA term"""
    cpu: np.ndarray
    """f64[N layers]: seconds of each layer, the base's part included, if CPU workers compute its LoRA term; inf if they
    can't"""
    load: np.ndarray
    """f64[N layers]: seconds to transfer each layer over this load's share of the link; 0 for layers already on the
    device"""
    in_host: np.ndarray
    """f64[N layers]: seconds from now until each layer is in host memory; 0 for layers already in host memory"""
    results: np.ndarray | None = None
    """f64[N layers]: seconds by which the workers' results for each layer delay the load, since they use the same link;
    None: no delay"""
    latency: float = 0.0
    """latency of the link in seconds, added once per load"""
    ahead: float = 0.0
    """seconds until the device has computed earlier chunks and can begin this one"""
    other_requests: int = 0
    """number of other requests, which also wait while the engine waits for workers"""
    apart: float = 0.0
    """total seconds that other requests lose if the chunk has a separate pass instead of joining theirs"""
    decode: DecodeCosts | None = None
    """costs of the decode steps after the chunk; None if no step follows"""


@dataclass(frozen=True)
class Choice:
    """Chosen plan of a chunk, with its forecast."""

    name: str
    assisted: int
    """number of assisted layers: CPU workers compute the first ones, except those that have arrived by then"""
    seconds: float
    """forecast seconds until the chunk's end"""
    exposed: float
    """forecast seconds by which the chunk ends later than one whose adapter is on the device, behind the same earlier
    chunks"""
    loaded: float = 0.0
    """forecast seconds until the whole adapter is on the device"""
    undecided: bool = False
    """whether `assist` is probably better, but too few passes were measured to be certain"""

    def order(self, layers: int) -> list[int]:
        """Returns the order in which to load the layers."""
        return [*range(self.assisted, layers), *range(self.assisted)]


@dataclass(frozen=True)
class StepCosts:
    """Costs of a decode step that rows of one loading adapter may join; times in seconds."""

    device: float
    """seconds of the step without rows of loading adapters"""
    longer: float
    """extra seconds of the step if the rows of this adapter join it"""
    before: float
    """extra seconds of the step due to rows of other loading adapters that have already joined it"""
    load_left: float
    """seconds until the adapter's load ends"""
    rows: int
    other_requests: int
    """number of other requests that are in the step or wait for its end"""
    results: float = 0.0
    """seconds by which the workers' results for these rows delay the load, since they use the same link"""


def forecast(costs: ChunkCosts) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays f64[N + 1], by the number of assisted layers, 0 to N. The first has the seconds until the
    chunk's last layer is computed, the second those until the whole adapter is on the device."""
    layers = len(costs.load)
    assisted = np.arange(layers + 1)
    results = np.zeros(layers) if costs.results is None else costs.results
    sooner = np.concatenate(([0.0], np.cumsum(np.where(costs.load > 0, results, 0.0))))
    link = (costs.latency if costs.load.any() else 0.0) + sooner
    done = np.full(layers + 1, costs.ahead)
    for i in range(layers):
        loads = assisted <= i
        arrived = np.where(loads, np.maximum(link, costs.in_host[i]) + costs.load[i], link)
        by_device = np.maximum(done, arrived) + costs.device
        by_cpu = np.maximum(done, costs.in_host[i]) + costs.cpu[i]
        done = np.where(loads, by_device, by_cpu)
        link = arrived
    last = np.concatenate(([0.0], np.maximum.accumulate(costs.in_host)))
    loaded = np.maximum(link, last) + np.concatenate(([0.0], np.cumsum(costs.load)))
    return done, loaded


def wait_seconds(costs: ChunkCosts) -> float:
    """Returns the seconds until the chunk is computed if the pass first waits for the whole adapter."""
    return max(float(forecast(costs)[1][0]), costs.ahead) + costs.device * len(costs.load)


def answer_ends(first: np.ndarray, loaded: np.ndarray, decode: DecodeCosts | None) -> np.ndarray:
    """Returns the seconds until the answer ends, for each candidate plan. The warm decode steps are left out, since all
    candidates have the same.

    `first`: f64, seconds until the chunk ends; `loaded`: f64, seconds until the adapter is on the device.
    """
    if decode is None:
        return first
    waiting = np.maximum(first, loaded)
    if not np.isfinite(decode.longer):
        waiting_ends: np.ndarray = waiting
        return waiting_ends
    joined_step = decode.step + decode.longer
    load_s = np.maximum(0.0, loaded - first)
    joined = np.minimum(np.ceil(load_s / max(joined_step - decode.results, 1e-9)), decode.tokens)
    ends: np.ndarray = np.minimum(waiting, first + joined * decode.longer)
    return ends


def choose(costs: ChunkCosts, allowed: tuple[str, ...] = PLANS, bounds: Bounds = exact) -> Choice:
    """Returns the plan that minimises the total time of all requests. Among plans within NOT_WORTH of the minimum, it
    takes the one whose chunk ends first; among those within NOT_WORTH of that, the simplest.

    `assist` is chosen only if its chunk's upper bound is below the lower bound of the best other plan, and the total
    time is no worse. Raises ValueError if none of `allowed` is possible.
    """
    plans = _Plans(costs, bounds)
    plain = plans.best([name for name in allowed if name != "assist"])
    assist = plans.best(["assist"]) if "assist" in allowed else None
    if plain is None and assist is None:
        raise ValueError(f"none of the plans {allowed} is possible for this prompt")
    if assist is not None and (plain is None or plans.replaces(assist, plain)):
        return plans.choice(assist)
    assert plain is not None
    return replace(plans.choice(plain), undecided=assist is not None and plans.may_replace(assist, plain))


class _Plans:
    """Candidate plans for one chunk: `wait`, `pipeline`, and `assist` with 1..N layers. All arrays have one element per
    candidate, in this order."""

    def __init__(self, costs: ChunkCosts, bounds: Bounds) -> None:
        self._costs, self._warm = costs, costs.device * len(costs.load)
        ends, loaded = forecast(costs)
        self._loaded = np.array([loaded[0], *loaded])
        net = np.array([wait_seconds(costs), *ends]) - costs.ahead
        by_name = [bounds(name, net[part]) for name, part in OF_NAME.items()]
        self._low, self._ends, self._high = (costs.ahead + np.concatenate(part) for part in zip(*by_name, strict=True))
        self._together = answer_ends(self._ends, self._loaded, costs.decode) + _lost_by_others(costs)

    def best(self, names: list[str]) -> int | None:
        """Returns the index of the best candidate of these plans; None if none is possible."""
        possible = np.zeros(len(self._ends), bool)
        for name in names:
            possible[OF_NAME[name]] = True
        possible &= np.isfinite(self._ends)
        if not possible.any():
            return None
        close = NOT_WORTH * self._warm
        possible &= self._together <= self._together[possible].min() + close
        ends = np.where(possible, self._ends, np.inf)
        soon = ends.min() + close
        part = next(OF_NAME[name] for name in PLANS if ends[OF_NAME[name]].min(initial=np.inf) <= soon)
        return int(np.argmin(ends[part])) + (part.start or 0)

    def replaces(self, assist: int, plain: int) -> bool:
        """Returns whether an assisted plan certainly brings the first token sooner than a plain one, without more total
        time. If other requests would be delayed, the total time must even be shorter by NOT_WORTH."""
        return self._is_sooner(self._high[assist], self._low[plain]) and self.may_replace(assist, plain)

    def may_replace(self, assist: int, plain: int) -> bool:
        """Returns whether an assisted plan replaces a plain one if likely times are compared instead of bounds
        (`replaces`)."""
        gain = self._together[plain] - self._together[assist]
        min_gain = NOT_WORTH * self._warm if self._costs.other_requests else 0.0
        return self._is_sooner(self._ends[assist], self._ends[plain]) and bool(gain >= min_gain)

    def _is_sooner(self, assist: float, plain: float) -> bool:
        return bool(assist + NOT_WORTH * self._warm < plain)

    def choice(self, at: int) -> Choice:
        name = PLANS[min(at, 2)]
        seconds = float(self._ends[at])
        exposed = max(0.0, seconds - self._warm - self._costs.ahead)
        return Choice(name, max(0, at - 1), seconds, exposed, float(self._loaded[at]))


OF_NAME = {"wait": slice(0, 1), "pipeline": slice(1, 2), "assist": slice(2, None)}
"""Slices of the arrays of _Plans, by plan: the plan's candidates."""


def _lost_by_others(costs: ChunkCosts) -> np.ndarray:
    """Returns f64[N + 2]: total seconds that other requests lose, by candidate: `wait`, `pipeline`, and `assist` of
    1..N layers."""
    lost = np.zeros(len(costs.load) + 2)
    lost[1:] = costs.apart
    if costs.other_requests:
        lost[2:] += costs.other_requests * np.cumsum(np.maximum(0.0, costs.cpu - costs.device))
    return lost


def longest_step(device: float, rows: int, other_requests: int) -> float:
    """Returns the maximum extra seconds of a decode step for rows that join it. `device`: seconds of the step without
    them; `rows`: their number; `other_requests`: number of requests that they delay.

    A row that does not join loses a step; a row that joins delays each other request.
    """
    return device * min(MAX_JOIN_SHARE, rows / (rows + other_requests)) if other_requests else np.inf


def joins(step: StepCosts) -> bool:
    """Returns whether the rows join the step. All requests together must gain time, and the step may grow by at most
    MAX_JOIN_SHARE. Without other requests, joining must be faster than waiting for the rest of the load."""
    if not step.other_requests:
        return step.longer + step.results <= step.load_left
    max_longer = longest_step(step.device, step.rows, step.other_requests)
    return step.longer <= max_longer and step.before + step.longer <= MAX_JOIN_SHARE * step.device
