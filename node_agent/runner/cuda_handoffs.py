"""Layers of a prompt pass that are captured in pieces, between which work is handed to CPU workers.

A CUDA graph can't wait for a worker. Therefore a layer is cut before and after the base product of each projection
group that workers may compute LoRA for. Between the pieces, a handoff's copy, signal and wait are enqueued one by one,
at constant addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from node_agent.runner.cuda_layers import AttentionInputs, Decoder, HiddenState
from node_agent.runner.cuda_stream import Stream, Work
from node_agent.types import GROUPS, ArrivingLora

HANDOFF_GROUPS = (("qkv",), tuple(GROUPS))
"""Sets of projection groups at which a layer is cut. A pass uses the first set that has all groups that its adapter
adapts."""
GRAPHS_PER_LAYER = sum(2 * len(groups) + 1 for groups in HANDOFF_GROUPS)
MAX_GRAPHS = 2560
"""Maximum number of CUDA graphs of all buckets, since each takes memory, and some milliseconds at the start.

Six buckets of up to 256 tokens have 2,304 graphs for a 7B model. For a deeper model the larger buckets get none.
"""


class BucketMemory(Protocol):
    """Parts of a bucket (cuda_prompts.PromptBucket) that its HandoffLayers use."""

    inputs: AttentionInputs
    hidden: HiddenState

    def begin(self, layer: int) -> HiddenState: ...

    def end(self, hidden: HiddenState) -> None: ...


@dataclass(frozen=True)
class PieceBuffers:
    """Tensors that pass values between the pieces of a layer.

    All layers of all buckets share them: the pieces of a layer run in order on one stream, and no other pass runs
    between them.
    """

    x: Mapping[str, torch.Tensor]
    """input [T, d_in] of each group"""
    y: Mapping[str, torch.Tensor]
    """base product [T, sum of widths] of each group, to which LoRA is added"""

    def of(self, tokens: int) -> PieceBuffers:
        """Returns the first rows of the tensors, for a bucket of `tokens`."""
        return PieceBuffers(*({group: one[:tokens] for group, one in kind.items()} for kind in (self.x, self.y)))


def allocate_buffers(decoder: Decoder, tokens: int) -> PieceBuffers:
    """Allocates the PieceBuffers for passes of at most `tokens`."""
    new, layer = decoder.embed_tokens.weight.new_zeros, decoder.layers[0]
    parts = {group: layer.projection(group) for group in GROUPS}
    return PieceBuffers(
        {group: new(tokens, part.d_in) for group, part in parts.items()},
        {group: new(tokens, sum(part.widths)) for group, part in parts.items()},
    )


class HandoffLayer:
    """Captured layer of a bucket, cut at the projection groups `groups`. These are in the order of GROUPS."""

    def __init__(
        self,
        decoder: Decoder,
        bucket: BucketMemory,
        index: int,
        groups: tuple[str, ...],
        buffers: PieceBuffers,
        stream: Stream,
    ) -> None:
        """Captures the pieces of the layer. The bucket must have a batch of padding."""
        self.index, self.groups = index, groups
        self._layer, self._decoder, self._bucket, self._buffers = decoder.layers[index], decoder, bucket, buffers
        self._pieces: list[tuple[str, Work, Work]] = []
        """for each group: its name, the work up to its input, and its base product"""
        before = None
        for group in groups:
            lead = stream.capture(partial(self._between, before, group))
            self._pieces.append((group, lead, stream.capture(partial(self._product, group))))
            before = group
        self._rest = stream.capture(partial(self._between, before, None))

    def covers(self, lora: ArrivingLora) -> bool:
        """Returns True if the layer is cut at all groups that the adapter adapts."""
        return all(group in self.groups or not lora.adapts(self.index, group) for group in GROUPS)

    def enqueue(self, lora: ArrivingLora, tokens: int) -> None:
        """Enqueues the layer, with its adapter, for a pass of `tokens`."""
        for group, lead, product in self._pieces:
            lead()
            adds = lora.begin(self.index, group, self._buffers.x[group][:tokens])
            product()
            if adds:
                y = self._buffers.y[group][:tokens]
                lora.finish(self.index, group, self._layer.projection(group).parts_of(y))
        self._rest()

    def _between(self, done: str | None, upto: str | None) -> None:
        """Computes the part of the layer between two groups: from the output of `done` (None: the layer's input) to the
        input of `upto` (None: the layer's output)."""
        order = list(GROUPS)
        first = 0 if done is None else order.index(done) + 1
        last = len(order) if upto is None else order.index(upto)
        y = None if done is None else self._buffers.y[done]
        hidden = self._hidden_after(done)
        for group in order[first:last]:
            y = self._layer.projection(group).product(self._input(group, hidden, y))
            hidden.take(group, y)
        if upto is None:
            self._bucket.end(hidden)
        else:
            self._buffers.x[upto].copy_(self._input(upto, hidden, y))

    def _hidden_after(self, done: str | None) -> HiddenState:
        """Returns the pass's hidden state after group `done`.

        Earlier groups have nothing more to add to the residual stream: the input of each group is computed from the
        full sum, or from a group whose input was.
        """
        if done is None:
            return self._bucket.begin(self.index)
        hidden = HiddenState(self._bucket.hidden.residual)
        hidden.take(done, self._buffers.y[done])
        return hidden

    def _input(self, group: str, hidden: HiddenState, y: torch.Tensor | None) -> torch.Tensor:
        return self._decoder.input_of(group, self._layer, hidden, y, self._bucket.inputs)

    def _product(self, group: str) -> None:
        x, y = self._buffers.x[group], self._buffers.y[group]
        y.copy_(self._layer.projection(group).linear.forward(x))
