"""LoRA of a cold pass. Each layer is computed with the device's weights if they have arrived, else by CPU workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from node_agent.coldstart.assist import AssistedPass
from node_agent.coldstart.messages import Share
from node_agent.leases import LayerState
from node_agent.types import GROUPS, PassLora

ON_DEVICE = (LayerState.ENQUEUED, LayerState.DEVICE)
"""States of layers that the device computes. Where a copy is only enqueued, the device's stream waits for it."""


class ColdLora:
    """ArrivingLora of one adapter that may be only partly on the device.

    The first `begin` of a layer decides whether the device or workers compute it. A failed handoff poisons the pass:
    its values are wrong from that layer on and must not be used, and no LoRA terms are computed for the remaining
    layers. On a GPU a failure is certain only once the pass has ended.
    """

    def __init__(
        self,
        on_device: PassLora,
        state: Callable[[int], int],
        adapted: Callable[[int, str], bool],
        workers: AssistedPass | None,
        await_copy: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_device` computes layers whose weights have arrived, or will have after `await_copy`. `adapted` returns
        whether a layer's group has LoRA weights."""
        self._device_part, self._state, self._adapted, self._workers = on_device, state, adapted, workers
        self._await_copy = await_copy
        self._here: dict[int, bool] = {}
        self._handoff: Share | None = None
        self._failed = False
        self.waited = 0.0
        """seconds that the engine has waited for workers"""

    @property
    def poisoned(self) -> bool:
        """Returns whether a handoff has failed, so that the pass's values are invalid."""
        return self._failed or (self._workers is not None and self._workers.failed)

    @property
    def layers_on_device(self) -> int:
        return sum(self._here.values())

    @property
    def layers_on_cpu(self) -> int:
        return len(self._here) - self.layers_on_device

    @property
    def on_device(self) -> PassLora:
        return self._device_part

    @property
    def hands_over(self) -> bool:
        return self._workers is not None

    def adapts(self, layer: int, group: str) -> bool:
        return self._adapted(layer, group)

    def claim(self, layer: int) -> bool:
        here = self._here.get(layer)
        if here is None:
            state = self._state(layer)
            here = self._here[layer] = state in ON_DEVICE
            if here and self._workers is not None:
                self._workers.rest()
            if state == LayerState.ENQUEUED:
                self._await_copy(layer)
            if not here and self._workers is None:
                self._failed |= any(self.adapts(layer, group) for group in GROUPS)
        return here

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        if self.claim(layer):
            return self._device_part.begin(layer, group, x)
        if not self.poisoned and self.adapts(layer, group):
            self._handoff = self._workers.open(x, layer, group) if self._workers else None
            self._failed = self._handoff is None
        return self._handoff is not None

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        if self._here[layer]:
            self._device_part.finish(layer, group, ys)
        elif self._handoff is not None:
            handoff, self._handoff = self._handoff, None
            begin = time.perf_counter()
            try:
                arrived = handoff.wait()
                self.waited += time.perf_counter() - begin
                if arrived:
                    for y, part in zip(ys, handoff.outputs, strict=True):
                        y.add_(part)
                else:
                    self._failed = True
            finally:
                handoff.close()
                if self._workers is not None:
                    self._workers.answered()

    def close(self) -> None:
        """Ends the pass's use of workers, whether it succeeded or not."""
        if self._handoff is not None:
            self._handoff.close()
            self._handoff = None
        if self._workers is not None:
            self._failed = self.poisoned
            self._workers.end()
            self._workers = None
