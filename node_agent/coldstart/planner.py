"""Chooses how a cold chunk gets its weights (Toppings 4.1): wait, pipeline, or assist + pipeline; and whether rows join
a decode step whose adapter is still loading.

A forecast walks the layers once, for every possible size g of the first group at the same time: layers g..N-1 are
loaded in order while the CPU workers compute the adapter's part of layers 0..g-1, which are loaded last. g = 0 is the
pipeline without the CPU; `wait` stalls until everything is there. The workers' results cross the link in the direction
of the weights, so each assisted layer delays the load.

While bytes are awaited the engine serves others; while workers are awaited it stalls, and all wait. Only a chunk that
waits for its whole adapter joins the others' pass; any other has a separate pass, which reads the base's weights once
more. Choices therefore count the time of all requests together: that of the chunk's own, and what each of the others
loses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

NOT_WORTH = 0.01
"""Share of a warm prefill by which a plan with more coordination must end sooner to be taken."""
JOINS_AT_MOST = 0.25
"""Share of a step's time by which rows whose adapters are loading may lengthen the others' next step, together."""
PLANS = ("wait", "pipeline", "assist")
"""Names of the plans, the plainest first."""

Bounds = Callable[[str, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""(plan, forecast seconds of whole passes) -> their lower bounds, most likely values and upper bounds."""


def exact(_: str, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the forecast as its own bounds."""
    return seconds, seconds, seconds


@dataclass(frozen=True)
class Contention:
    """Work that the engine has besides while a cold chunk is computed."""

    ahead: float = 0.0
    """seconds for which it computes other cold chunks first"""
    other_requests: int = 0
    ready: int = 0
    """number of those whose adapters are on the device"""
    decodes: int = 0
    """tokens of the request that are decoded after the chunk, as far as is known; 0: none"""


@dataclass(frozen=True)
class DecodeCosts:
    """Decode steps that follow a chunk. Seconds."""

    tokens: int
    """expected number of steps"""
    step: float
    """duration of one step with the adapter on the device"""
    longer: float
    """extra duration of a step that the row joins while its adapter is loading; inf: it can't join"""
    results: float = 0.0
    """delay of the load by the results of one joined step"""


@dataclass(frozen=True)
class ChunkCosts:
    """Seconds, per layer, for one chunk of one adapter."""

    device: float
    """a layer on the device, adapter included"""
    cpu: np.ndarray
    """f64[N]: a layer whose adapter part is computed by CPU workers, the base's part included; inf: not possible"""
    load: np.ndarray
    """f64[N]: a layer's bytes over this load's share of the link; 0 for what is on the device already"""
    in_host: np.ndarray
    """f64[N]: seconds from now until the layer is in host memory; 0 for what is there"""
    results: np.ndarray | None = None
    """f64[N]: delay of the load by an assisted layer's results, which cross the same link; None: there is none"""
    latency: float = 0.0
    """latency of the link, once"""
    ahead: float = 0.0
    """seconds until the device comes to the chunk's first layer: other chunks are before it"""
    other_requests: int = 0
    """requests that wait wherever the engine waits for workers"""
    apart: float = 0.0
    """seconds that the others together lose where the chunk has a separate pass instead of joining theirs"""
    decode: DecodeCosts | None = None
    """steps that follow the chunk; None: there are none"""


@dataclass(frozen=True)
class Choice:
    name: str
    assisted: int
    """layers 0..assisted-1 are for the CPU, unless they have arrived when they are needed"""
    seconds: float
    """forecast of the chunk's end"""
    exposed: float
    """forecast of the time beyond a warm chunk's, those ahead of it included"""
    loaded: float = 0.0
    """forecast of the time at which the whole adapter is on the device"""
    undecided: bool = False
    """`assist` is likely to be better, but too few passes were measured to be certain"""

    def order(self, layers: int) -> list[int]:
        """The order in which the layers are to be loaded."""
        return [*range(self.assisted, layers), *range(self.assisted)]


@dataclass(frozen=True)
class StepCosts:
    """A decode step that rows of one adapter, which is still loading, may join. Seconds."""

    device: float
    """duration of the step without any row that joins it"""
    longer: float
    """extra duration by these rows"""
    before: float
    """extra duration by rows that have joined already"""
    load_left: float
    """rest of the adapter's load"""
    rows: int
    other_requests: int
    """requests other than these rows' that the step is computed for, or that wait for its end"""
    results: float = 0.0
    """delay of the load by these rows' results, which cross the same link"""


def forecast(costs: ChunkCosts) -> tuple[np.ndarray, np.ndarray]:
    """Returns, both f64[N + 1], for every size of the assisted group: seconds until the chunk's last layer is computed,
    and until the whole adapter is on the device."""
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
    """Returns the seconds until the chunk is computed when the pass waits for the whole adapter first."""
    return max(float(forecast(costs)[1][0]), costs.ahead) + costs.device * len(costs.load)


def answer_ends(first: np.ndarray, loaded: np.ndarray, decode: DecodeCosts | None) -> np.ndarray:
    """Returns f64 like `first`: seconds until the answer ends, less its warm decode steps, for chunks that end at
    `first` and whose adapters are on the device at `loaded`."""
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
    """Returns the plan by which the requests end first, all together. Among plans within NOT_WORTH of that, the one
    whose chunk ends first is taken, and among those within NOT_WORTH of it the plainest.

    `assist` replaces the others only where its chunk's upper bound lies below the lower bound of the plan that would be
    taken without it, and the requests end no later. Raises ValueError where none of `allowed` is possible.
    """
    plans = _Plans(costs, bounds)
    plain = plans.best([name for name in allowed if name != "assist"])
    assist = plans.best(["assist"]) if "assist" in allowed else None
    if plain is None and assist is None:
        raise ValueError(f"none of {allowed} is possible here")
    if assist is not None and (plain is None or plans.replaces(assist, plain)):
        return plans.choice(assist)
    assert plain is not None
    return replace(plans.choice(plain), undecided=assist is not None and plans.may_replace(assist, plain))


class _Plans:
    """The plans for one chunk: `wait`, `pipeline`, and `assist` of 1..N layers, in this order in every array."""

    def __init__(self, costs: ChunkCosts, bounds: Bounds) -> None:
        self._costs, self._warm = costs, costs.device * len(costs.load)
        ends, loaded = forecast(costs)
        self._loaded = np.array([loaded[0], *loaded])
        net = np.array([wait_seconds(costs), *ends]) - costs.ahead
        by_name = [bounds(name, net[part]) for name, part in OF_NAME.items()]
        self._low, self._ends, self._high = (costs.ahead + np.concatenate(part) for part in zip(*by_name, strict=True))
        self._together = answer_ends(self._ends, self._loaded, costs.decode) + _lost_by_others(costs)

    def best(self, names: list[str]) -> int | None:
        """Returns the index of the best of these plans; None where none is possible."""
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
        """Returns whether an assisted plan is certain to have the first token sooner, and costs all requests together
        no time. Where other requests would be held up, it must gain some."""
        return self._is_sooner(self._high[assist], self._low[plain]) and self.may_replace(assist, plain)

    def may_replace(self, assist: int, plain: int) -> bool:
        """Returns the same as `replaces`, by the most likely times alone."""
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
"""Places of the plans in the arrays of _Plans."""


def _lost_by_others(costs: ChunkCosts) -> np.ndarray:
    """f64[N + 2]: seconds that all others together lose by `wait`, `pipeline` and `assist` of 1..N layers."""
    lost = np.zeros(len(costs.load) + 2)
    lost[1:] = costs.apart
    if costs.other_requests:
        lost[2:] += costs.other_requests * np.cumsum(np.maximum(0.0, costs.cpu - costs.device))
    return lost


def longest_step(device: float, rows: int, other_requests: int) -> float:
    """Returns the seconds by which `rows` rows that join may lengthen a step of `device` seconds for `other_requests`
    others: a row that sits it out loses a step, and one that joins costs each of the others what it takes."""
    return device * min(JOINS_AT_MOST, rows / (rows + other_requests)) if other_requests else np.inf


def joins(step: StepCosts) -> bool:
    """Returns whether the rows join: all requests together gain by it, and the others' step stays within JOINS_AT_MOST.
    Where there are no others the rows lose nothing by waiting but the rest of their load, which their results delay."""
    if not step.other_requests:
        return step.longer + step.results <= step.load_left
    max_longer = longest_step(step.device, step.rows, step.other_requests)
    return step.longer <= max_longer and step.before + step.longer <= JOINS_AT_MOST * step.device
