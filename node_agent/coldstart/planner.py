"""Chooses how a cold chunk gets its weights (Toppings 4.1): wait, pipeline, or assist + pipeline; and whether rows join
a decode step whose adapter is on its way.

A forecast walks the layers once, for every possible size g of the first group at the same time: layers g..N-1 are
loaded in order while the CPU workers compute the adapter's part of layers 0..g-1, which are loaded last. g = 0 is the
pipeline without the CPU; `wait` stands still until everything is there.

While bytes are awaited the engine serves others; while workers are awaited it stands still, and all wait. Only a chunk
that waits for its whole adapter joins the others' pass; any other has a pass of its own, which reads the base's weights
once more. Choices therefore count the time of all requests together: that of the chunk's own, and what each of the
others loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NOT_WORTH = 0.01
"""A plan with more coordination is taken only where it ends sooner by this share of a warm prefill."""
JOINS_AT_MOST = 0.25
"""Of a step's time: by so much rows whose adapters are on their way may lengthen the others' next step, together."""
PLANS = ("wait", "pipeline", "assist")
"""The plainest first."""


@dataclass(frozen=True)
class Contention:
    """What else the engine has to do while a cold chunk is computed."""

    ahead: float = 0.0
    """seconds for which it computes other cold chunks first"""
    others: int = 0
    """requests that it serves meanwhile"""
    ready: int = 0
    """those of them whose adapters are on the device"""
    decodes: bool = False
    """tokens of the request follow the chunk"""


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
    latency: float = 0.0
    """of the link, once"""
    ahead: float = 0.0
    """until the device comes to the chunk's first layer: other chunks are before it"""
    others: int = 0
    """requests that wait wherever the engine waits for workers"""
    apart: float = 0.0
    """seconds that the others together lose where the chunk has a pass of its own instead of joining theirs"""
    decodable: float = 0.0
    """seconds from now until the adapter's rows may decode; 0: at once, or no token follows the chunk"""


@dataclass(frozen=True)
class Choice:
    name: str
    """wait, pipeline or assist"""
    assisted: int
    """layers 0..assisted-1 are for the CPU, unless they have arrived when they are needed"""
    seconds: float
    """forecast of the chunk's end"""
    exposed: float
    """forecast of the time beyond a warm chunk's, those ahead of it included"""

    def order(self, layers: int) -> list[int]:
        """The order in which the layers are to be loaded."""
        return [*range(self.assisted, layers), *range(self.assisted)]


@dataclass(frozen=True)
class StepCosts:
    """A decode step that rows of one adapter, which is on its way, may join. Seconds."""

    device: float
    """of the step without any row that joins it"""
    longer: float
    """by so much these rows lengthen it"""
    before: float
    """by so much those lengthen it that have joined already"""
    left: float
    """of the adapter's load"""
    rows: int
    others: int
    """requests beside these rows' that the step is computed for, or that wait for its end"""


def forecast(costs: ChunkCosts) -> np.ndarray:
    """f64[N + 1]: seconds until the chunk's last layer is computed, for every size of the assisted group."""
    layers = len(costs.load)
    assisted = np.arange(layers + 1)
    link = np.full(layers + 1, costs.latency)
    done = np.full(layers + 1, costs.ahead)
    for i in range(layers):
        loads = assisted <= i
        arrived = np.where(loads, np.maximum(link, costs.in_host[i]) + costs.load[i], link)
        by_device = np.maximum(done, arrived) + costs.device
        by_cpu = np.maximum(done, costs.in_host[i]) + costs.cpu[i]
        done = np.where(loads, by_device, by_cpu)
        link = arrived
    return done


def arrivals(costs: ChunkCosts) -> np.ndarray:
    """f64[N]: seconds until each layer is on the device, loaded from the first to the last."""
    link, found = costs.latency if costs.load.any() else 0.0, np.empty(len(costs.load))
    for i in range(len(costs.load)):
        link = found[i] = max(link, float(costs.in_host[i])) + float(costs.load[i])
    return found


def wait_seconds(costs: ChunkCosts) -> float:
    """Returns the seconds until the chunk is computed when the pass waits for the whole adapter first."""
    return max(float(arrivals(costs)[-1]), costs.ahead) + costs.device * len(costs.load)


def choose(costs: ChunkCosts, allowed: tuple[str, ...] = PLANS) -> Choice:
    """Returns the plan by which the requests end first, all together; among those by which they end within NOT_WORTH of
    each other the one whose chunk ends first, and among those that do so within NOT_WORTH the plainest. Raises
    ValueError where none of `allowed` is possible."""
    layers = len(costs.load)
    warm = costs.device * layers
    ends = np.array([wait_seconds(costs), *forecast(costs)])  # wait, pipeline, assist of 1..N layers
    together = np.maximum(ends, costs.decodable) + _lost_by_others(costs)
    of_name = {"wait": slice(0, 1), "pipeline": slice(1, 2), "assist": slice(2, None)}
    possible = np.zeros(layers + 2, bool)
    for name in allowed:
        possible[of_name[name]] = True
    possible &= np.isfinite(ends)
    if not possible.any():
        raise ValueError(f"none of {allowed} is possible here")
    possible &= together <= together[possible].min() + NOT_WORTH * warm
    ends = np.where(possible, ends, np.inf)
    soon = ends.min() + NOT_WORTH * warm
    name = next(name for name in PLANS if ends[of_name[name]].min(initial=np.inf) <= soon)
    at = int(np.argmin(ends[of_name[name]]))
    seconds = float(ends[of_name[name]][at])
    return Choice(name, at + 1 if name == "assist" else 0, seconds, max(0.0, seconds - warm - costs.ahead))


def _lost_by_others(costs: ChunkCosts) -> np.ndarray:
    """f64[N + 2]: seconds that all others together lose by `wait`, `pipeline` and `assist` of 1..N layers."""
    lost = np.zeros(len(costs.load) + 2)
    lost[1:] = costs.apart
    if costs.others:
        lost[2:] += costs.others * np.cumsum(np.maximum(0.0, costs.cpu - costs.device))
    return lost


def longest_step(device: float, rows: int, others: int) -> float:
    """Returns the seconds by which `rows` rows that join may lengthen a step of `device` seconds for `others` other
    requests: a row that sits it out loses a step, and one that joins costs each of the others what it takes."""
    return device * min(JOINS_AT_MOST, rows / (rows + others)) if others else np.inf


def joins(step: StepCosts) -> bool:
    """Returns whether the rows join: all requests together gain by it, and the others' step stays within JOINS_AT_MOST.
    Where there are no others the rows lose nothing by waiting but the rest of their load."""
    if not step.others:
        return step.longer <= step.left
    most = longest_step(step.device, step.rows, step.others)
    return step.longer <= most and step.before + step.longer <= JOINS_AT_MOST * step.device
