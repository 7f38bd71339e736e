"""Replaces a decoder layer's linear modules by fused ones that call the pass's LoRA around the base product.

q, k and v become one product, and so do gate and up: the first module computes all, the others return their part. The
model's forward code is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from adapters.model_families import ModelFamily
from node_agent.runner.products import Linear, Products
from node_agent.types import GROUPS, PassLora


@dataclass
class Current:
    """State of the current pass for a model's projections. One per runner."""

    lora: PassLora | None = None


class FusedProjection(nn.Module):
    """Product of a projection group with its shared input. `forward` returns the first projection's output and stores
    the others."""

    def __init__(
        self, current: Current, layer: int, group: str, linears: list[nn.Linear], products: Products | None
    ) -> None:
        super().__init__()
        self.current, self.layer, self.group = current, layer, group
        self.d_in, self.widths = linears[0].in_features, [module.out_features for module in linears]
        bias = None
        if any(module.bias is not None for module in linears):
            bias = torch.cat([_bias(module) for module in linears])
        self.linear = Linear(torch.cat([module.weight.data for module in linears]), bias, products)
        self.parts: dict[int, torch.Tensor] = {}

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of all projections [T, sum of widths] for x [T, d_in], LoRA included."""
        lora = self.current.lora
        if lora is None or not lora.begin(self.layer, self.group, x):
            return self.linear.forward(x)
        y = self.linear.forward(x)
        lora.finish(self.layer, self.group, self.parts_of(y))
        return y

    def parts_of(self, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns views [T, width] of y [T, sum of widths], one of each projection."""
        return [y] if len(self.widths) == 1 else y.split_with_sizes(self.widths, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the first projection's output [1, T, widths[0]] for x [1, T, d_in], LoRA included. Stores the other
        projections' outputs in `parts`."""
        parts = self.product(x[0]).unsqueeze(0).split_with_sizes(self.widths, dim=-1)
        self.parts = dict(enumerate(parts[1:], start=1))
        return parts[0]


class FusedPart(nn.Module):
    """Projection whose output its group's FusedProjection has computed already."""

    def __init__(self, fused: FusedProjection, index: int) -> None:
        super().__init__()
        self._fused = (fused,)  # a tuple, so that the weights are not registered twice
        self.index = index

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self._fused[0].parts.pop(self.index)  # removed, or a pass would hold the activations of all layers


def _bias(module: nn.Linear) -> torch.Tensor:
    return torch.zeros_like(module.weight.data[:, 0]) if module.bias is None else module.bias.data


def fuse_projections(
    layer: Any, index: int, current: Current, family: ModelFamily, products: Products | None = None
) -> None:
    """Replaces a decoder layer's seven linears in place, group by group, so that memory grows by one group only."""
    for group, members in GROUPS.items():
        paths = [family.projections[member] for member in members]
        linears = [layer.get_submodule(path) for path in paths]
        for path, module in zip(paths, linears, strict=True):
            if type(module) is not nn.Linear:
                raise TypeError(f"layer {index}: {path} is a {type(module).__name__}; only nn.Linear can be served")
        fused = FusedProjection(current, index, group, linears, products)
        layer.set_submodule(paths[0], fused)
        for i, path in enumerate(paths[1:], start=1):
            layer.set_submodule(path, FusedPart(fused, i))


def layer_weights(layer: Any, family: ModelFamily) -> list[torch.Tensor]:
    """Returns the weights [d_out, d_in] of a decoder layer's seven linears, before they are fused."""
    return [layer.get_submodule(path).weight.data for path in family.projections]
