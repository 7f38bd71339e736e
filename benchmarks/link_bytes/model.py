"""The bytes that a cold call moves over the link, and the first token that an ideal machine gives: plain arithmetic.

The link is full duplex. Loading a layer's weights takes the direction to the device. CPU assistance takes both: x goes
to the host, once per projection group, and x A B comes back for each adapted projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ITEM = 2
"""Bytes of a number in bf16 or fp16."""
Targets = Literal["q,k,v", "all seven"]
NOTHING = 1e-3
"""Bytes that are missing by rounding alone."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that one layer moves."""

    weights: float
    up: float
    """bytes of x, to the host, if the layer is assisted"""
    down: float
    """bytes of the results, to the device, if the layer is assisted"""


@dataclass(frozen=True)
class Shape:
    """The widths of a base model's projections."""

    name: str
    layers: int
    width: int
    kv_width: int
    mlp_width: int

    def groups(self, targets: Targets) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the adapted projection groups of a layer: the width of the x that a group shares, and the output
        widths of its projections."""
        width, mlp = self.width, self.mlp_width
        qkv = (width, (width, self.kv_width, self.kv_width))
        return [qkv] if targets == "q,k,v" else [qkv, (width, (width,)), (width, (mlp, mlp)), (mlp, (width,))]

    def results(self, targets: Targets) -> int:
        """Returns the numbers of a token's results in one layer."""
        return sum(sum(outputs) for _, outputs in self.groups(targets))

    def border(self, targets: Targets) -> float:
        """Returns the tokens, for each unit of rank, from which a layer's results are more bytes than its weights."""
        return self._per_rank(targets) / self.results(targets)

    def layer_bytes(self, targets: Targets, rank: int, tokens: int) -> LayerBytes:
        return LayerBytes(
            weights=ITEM * rank * self._per_rank(targets),
            up=ITEM * tokens * sum(width for width, _ in self.groups(targets)),
            down=ITEM * tokens * self.results(targets),
        )

    def _per_rank(self, targets: Targets) -> int:
        return sum(width + out for width, outputs in self.groups(targets) for out in outputs)


def first_token(layers: int, seconds: float, size: LayerBytes, rate: float, group: int) -> float:
    """Returns the seconds from the call to its first token, for a first group of `group` assisted layers.

    `seconds` is what the device computes at each layer, `rate` the link's bytes/s in each direction. The weights of
    layers group..layers-1 are loaded first, in order, then those of the first group. CPU workers take no time and
    answer row by row, so an assisted layer takes as long as the longest of its computation, its x, and its results.
    Results and weights that cross together have half of the rate each. An assisted layer whose weights are there
    already is computed like any other.
    """
    now, remaining, order = 0.0, layers * size.weights, [*range(group, layers), *range(group)]
    for layer in range(layers):
        missing = max(remaining - (layers - 1 - order.index(layer)) * size.weights, 0.0)
        if layer < group and missing > NOTHING:
            end, shared = now + max(seconds, size.up / rate), min(remaining, size.down)
            now, remaining = now + (size.down + shared) / rate, remaining - shared
        else:
            now, remaining = now + missing / rate, remaining - missing
            end = now + seconds
        end = max(now, end)
        now, remaining = end, max(remaining - (end - now) * rate, 0.0)
    return now


def best_group(layers: int, seconds: float, size: LayerBytes, rate: float) -> tuple[float, int]:
    """Returns the seconds to the first token with the best size of the first group, and that size; 0 is the pipeline
    alone."""
    return min((first_token(layers, seconds, size, rate, group), group) for group in range(layers + 1))
