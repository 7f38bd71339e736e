"""The LoRA of a pass in which some rows' adapters are on the device and others' still on their way there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from node_agent.coldstart.cold_lora import ColdLora
from node_agent.types import PassLora


@dataclass(frozen=True)
class LoadingPart:
    """Tokens begin..end-1 of a pass, all of one adapter that is on its way."""

    begin: int
    end: int
    lora: ColdLora


class MixedLora:
    """A PassLora. A failure poisons the rows of loading parts alone: rows of a pass share no numbers."""

    def __init__(self, on_device: PassLora | None, parts: Sequence[LoadingPart], send: Callable[[], object]) -> None:
        """`on_device` adds the other tokens' adapters; None where these have none. `send` hands over, as one message,
        what the parts have for the workers."""
        self._on_device, self._parts, self._send = on_device, parts, send
        self._adds = False
        self._adding: list[LoadingPart] = []

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        # workers first: they compute while the device does all the rest
        self._adding = [part for part in self._parts if part.lora.begin(layer, group, x[part.begin : part.end])]
        self._send()
        self._adds = self._on_device is not None and self._on_device.begin(layer, group, x)
        return self._adds or bool(self._adding)

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        if self._adds:
            assert self._on_device is not None
            self._on_device.finish(layer, group, ys)
        for part in self._adding:
            part.lora.finish(layer, group, [y[part.begin : part.end] for y in ys])
