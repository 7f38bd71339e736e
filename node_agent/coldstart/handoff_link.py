"""Simulated link for handoffs: activations cross to host memory, results and weights cross to the device.

The link is full duplex. Results share the direction of loads, so each handoff slows these by its bytes. A worker delays
its answer by the time of both crossings; CPU and GPU engines thus simulate the link in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

from node_agent.adapter_memory.link import Flow, Link


class HandoffLink:
    """Charges handoffs to a simulated link between host memory and the device."""

    def __init__(self, to_device: Link, count_crossed: Callable[[int], None]) -> None:
        """`to_device`: simulated link of the adapters' loads; its config must not be None. `count_crossed` is called
        with the bytes of results that cross it."""
        assert to_device.config is not None
        self._to_device, self._config, self._count_crossed = to_device, to_device.config, count_crossed

    def charge(self, handed: int, answered: int) -> tuple[int, int]:
        """Starts a transfer of `answered` bytes to the device, which competes with the loads. Returns two delays in
        microseconds: before the workers start, while `handed` bytes cross, and before they answer."""
        sharing = 1 + self._to_device.active
        self._to_device.begin(Flow(), answered)
        self._count_crossed(answered)
        latency, bandwidth = self._config.latency, self._config.bandwidth
        before, after = latency + handed / bandwidth, latency + sharing * answered / bandwidth
        return round(before * 1e6), round(after * 1e6)
