"""Chooses how a cold chunk gets its weights (Toppings 4.1): wait, pipeline, or assist + pipeline.

A forecast walks the layers once, for every possible size g of the first group at the same time: layers g..N-1 are
loaded in order while the CPU workers compute the adapter's part of layers 0..g-1, which are loaded last. g = 0 is the
pipeline without the CPU; `wait` stands still until everything is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NOT_WORTH = 0.01
"""A plan with more coordination is taken only where it ends sooner by this share of a warm prefill."""


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


def wait_seconds(costs: ChunkCosts) -> float:
    """Returns the seconds until the chunk is computed when the pass waits for the whole adapter first."""
    link = costs.latency if costs.load.any() else 0.0
    for i in range(len(costs.load)):
        link = max(link, float(costs.in_host[i])) + float(costs.load[i])
    return max(link, costs.ahead) + costs.device * len(costs.load)


def choose(costs: ChunkCosts, allowed: tuple[str, ...] = ("wait", "pipeline", "assist")) -> Choice:
    """The plan that ends first; among those that end within NOT_WORTH of each other, the plainest."""
    layers = len(costs.load)
    warm = costs.device * layers
    ends = forecast(costs)
    best: Choice | None = None
    for name in ("wait", "pipeline", "assist"):
        if name not in allowed or (name == "wait" and costs.ahead and "pipeline" in allowed):
            continue  # the chunks ahead may end sooner than is thought, and `wait` could make nothing of it
        assisted = 1 + int(np.argmin(ends[1:])) if name == "assist" else 0
        seconds = wait_seconds(costs) if name == "wait" else float(ends[assisted])
        if not np.isfinite(seconds):
            continue
        if best is None or seconds < best.seconds - NOT_WORTH * warm:
            best = Choice(name, assisted, seconds, max(0.0, seconds - warm - costs.ahead))
    if best is None:
        raise ValueError(f"none of {allowed} is possible here")
    return best
