"""dLoRA's way of computing (OSDI 2024), as far as one engine goes: what coldstart.py compares as DLORA.

Every adapter is on the device, as long as memory lasts. When all that runs uses one adapter, its product is merged into
the base's weights; when something else runs beside it, the base's weights are put back and adapters are added by plain
matrix products, one segment after another. Kept copies make the way back free, which dLoRA, who subtracts, has to pay.
"""

from __future__ import annotations

from typing import Any

import torch

from node_agent.adapter_memory.weights import LayerWeights
from node_agent.engine.loop import Engine
from node_agent.runner.lora import SegmentedLora
from node_agent.runner.products import Linear
from node_agent.runner.projections import FusedProjection
from node_agent.types import Lease, LoraBatch, PassLora


class MergedLora:
    """Nothing is to be added: the base's weights hold the adapter."""

    def begin(self, *_: object) -> bool:
        return False

    def finish(self, *_: object) -> None:
        raise AssertionError("begin said that nothing is to be added")


class MergingLora:
    """Takes the place of an engine's `start_lora`. The engine must have a TransformersRunner on a CPU."""

    def __init__(self, engine: Engine) -> None:
        self.store, self.merges = engine.store, 0
        runner: Any = engine.runner
        modules = runner.model.modules()
        self._fused = {(m.layer, m.group): m for m in modules if isinstance(m, FusedProjection)}
        self._plain: dict[tuple[int, str], torch.Tensor] = {}
        """the base's weights of what adapters have adapted, as plain matrices"""
        self._base: dict[tuple[int, str], Linear] = {}
        self._merged = ""

    def start(self, batch: LoraBatch, decodes: bool) -> PassLora:  # noqa: ARG002 - StartLora's signature
        leases = {lease.digest: lease for lease in batch.leases if lease is not None}
        if len(leases) == 1 and None not in batch.leases:
            self._merge(next(iter(leases.values())))
            return MergedLora()
        self.unmerge()
        return SegmentedLora(batch, self.store.weights)

    def unmerge(self) -> None:
        for key, linear in self._base.items():
            self._fused[key].linear = linear
        self._base, self._merged = {}, ""

    @torch.inference_mode()
    def _merge(self, lease: Lease) -> None:
        if self._merged == lease.digest:
            return
        self.unmerge()
        for layer, groups in enumerate(self.store.weights(lease)):
            for group in groups:
                self._merge_group((layer, group), groups)
        self._merged, self.merges = lease.digest, self.merges + 1

    def _merge_group(self, key: tuple[int, str], groups: LayerWeights) -> None:
        fused = self._fused[key]
        weight = self._plain_weight(key).clone()
        parts = weight.split_with_sizes(fused.widths)
        for piece in groups[key[1]]:
            for index, low, high, b, scale in piece.parts:
                parts[index].addmm_(b.t(), piece.a[:, low:high].t(), alpha=scale)
        self._base[key] = fused.linear
        fused.linear = Linear(weight, fused.linear.bias)

    def _plain_weight(self, key: tuple[int, str]) -> torch.Tensor:
        found = self._plain.get(key)
        if found is None:
            weight = self._fused[key].linear.weight
            found = self._plain[key] = weight.to_dense() if weight.layout is not torch.strided else weight
        return found
