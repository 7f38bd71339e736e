"""A layer of a prompt's pass as captured pieces: CPU workers are handed their work between two of them.

Nothing waits inside a CUDA graph. So a layer is cut before and behind the base product of each projection group that
may be handed over. A handoff's copy, signal and wait are enqueued there one by one, at addresses that stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from node_agent.runner.cuda_layers import Attended, Decoder, Walk
from node_agent.runner.cuda_stream import Stream, Work
from node_agent.types import GROUPS, ArrivingLora

HANDED_OVER = (("qkv",), tuple(GROUPS))
"""Groups at which a layer is cut. A pass takes the first of these in which all groups are that its adapter adapts."""
GRAPHS_PER_LAYER = sum(2 * len(groups) + 1 for groups in HANDED_OVER)
MAX_GRAPHS = 2560
"""Graphs of all buckets together, at most: a graph takes memory and some milliseconds of the start. A 7B model's six
buckets of up to 256 tokens have 2,304; a deeper model's larger buckets have none."""


class WalkedBucket(Protocol):
    """Interface of a bucket (cuda_prompts.PromptBucket) to its HandedLayers."""

    attended: Attended
    walk: Walk

    def begin(self, layer: int) -> Walk: ...

    def end(self, walk: Walk) -> None: ...


@dataclass(frozen=True)
class Borders:
    """Memory where a layer's pieces meet. It serves every layer of every bucket: the pieces of one layer follow each
    other on one stream, with nothing of another pass between them."""

    x: Mapping[str, torch.Tensor]
    """[T, d_in] of each group"""
    y: Mapping[str, torch.Tensor]
    """[T, sum of widths] of each group: the base product, to which the adapter's part is added"""

    def of(self, tokens: int) -> Borders:
        """Returns the first rows, as many as a bucket has tokens."""
        return Borders(*({group: one[:tokens] for group, one in kind.items()} for kind in (self.x, self.y)))


def open_borders(decoder: Decoder, tokens: int) -> Borders:
    """Allocates them for passes of at most so many tokens."""
    new, layer = decoder.embed_tokens.weight.new_zeros, decoder.layers[0]
    parts = {group: layer.projection(group) for group in GROUPS}
    return Borders(
        {group: new(tokens, part.d_in) for group, part in parts.items()},
        {group: new(tokens, sum(part.widths)) for group, part in parts.items()},
    )


class HandedLayer:
    """One layer of a bucket, cut at `groups`, which are in the order of GROUPS."""

    def __init__(
        self,
        decoder: Decoder,
        bucket: WalkedBucket,
        index: int,
        groups: tuple[str, ...],
        borders: Borders,
        stream: Stream,
    ) -> None:
        """Captures the pieces: the bucket must hold a batch of padding alone."""
        self.index, self.groups = index, groups
        self._layer, self._decoder, self._bucket, self._borders = decoder.layers[index], decoder, bucket, borders
        self._pieces: list[tuple[str, Work, Work]] = []
        """each group with what leads to its input, and its base product"""
        before = None
        for group in groups:
            lead = stream.capture(partial(self._between, before, group))
            self._pieces.append((group, lead, stream.capture(partial(self._product, group))))
            before = group
        self._rest = stream.capture(partial(self._between, before, None))

    def covers(self, lora: ArrivingLora) -> bool:
        """Returns True if the layer is cut wherever the adapter has a part in it."""
        return all(group in self.groups or not lora.adapts(self.index, group) for group in GROUPS)

    def enqueue(self, lora: ArrivingLora, tokens: int) -> None:
        """Enqueues the layer with the adapter's part for a pass of so many tokens."""
        for group, lead, product in self._pieces:
            lead()
            adds = lora.begin(self.index, group, self._borders.x[group][:tokens])
            product()
            if adds:
                y = self._borders.y[group][:tokens]
                lora.finish(self.index, group, self._layer.projection(group).parts_of(y))
        self._rest()

    def _between(self, done: str | None, upto: str | None) -> None:
        """Computes from behind group `done` (None: from the layer's begin) to the input of group `upto` (None: to the
        layer's end)."""
        order = list(GROUPS)
        first = 0 if done is None else order.index(done) + 1
        last = len(order) if upto is None else order.index(upto)
        y = None if done is None else self._borders.y[done]
        walk = self._walk(done)
        for group in order[first:last]:
            y = self._layer.projection(group).product(self._input(group, walk, y))
            walk.take(group, y)
        if upto is None:
            self._bucket.end(walk)
        else:
            self._borders.x[upto].copy_(self._input(upto, walk, y))

    def _walk(self, done: str | None) -> Walk:
        """Returns how far the pass has come behind group `done`. Nothing from before that group is left to be added to
        the residual stream: each group's input is made of the whole sum, or follows one that is."""
        if done is None:
            return self._bucket.begin(self.index)
        walk = Walk(self._bucket.walk.residual)
        walk.take(done, self._borders.y[done])
        return walk

    def _input(self, group: str, walk: Walk, y: torch.Tensor | None) -> torch.Tensor:
        return self._decoder.input_of(group, self._layer, walk, y, self._bucket.attended)

    def _product(self, group: str) -> None:
        x, y = self._borders.x[group], self._borders.y[group]
        y.copy_(self._layer.projection(group).linear.forward(x))
