"""Passes with prompts in a bucket of tokens, captured in stretches of a few layers.

To launch a pass kernel by kernel takes longer than a GPU computes some hundred tokens. A pass is cut into stretches
because a cold one stops at layers of its adapter that have not arrived. Other passes may run between two stretches, so
a bucket's memory belongs to one pass at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kernels.gpu_ops import Rows
from node_agent.runner.cuda_blocks import StepFields, expand_blocks, fill, lora_batch, size_of, step_spec, views
from node_agent.runner.cuda_decode import DecodeShape
from node_agent.runner.cuda_handoffs import GRAPHS_PER_LAYER, HANDOFF_GROUPS, MAX_GRAPHS, HandoffLayer, PieceBuffers
from node_agent.runner.cuda_layers import AttentionInputs, Decoder, HiddenState
from node_agent.runner.cuda_lora import CAPTURED_RANK, OpenAdd
from node_agent.runner.cuda_stream import Stream, Work
from node_agent.runner.lora import GroupLora
from node_agent.runner.projections import Current
from node_agent.types import ArrivingLora, LoraBatch, StepBatch

STRETCH_LAYERS = 4
SIZES = (16, 32, 64, *range(128, 513, 64), *range(640, 1025, 128))
"""Maximum tokens of each bucket. A pass with more tokens than the largest keeps a GPU busy while its next kernels are
launched, so it needs no bucket."""
LIGHT_TOKENS = 256
"""Number of tokens that a pass computes in hardly more time than one token, since reading the weights takes most of
it."""
FEW_ROWS = 8
"""Maximum rows of the buckets of each of SIZES. A captured pass starts programs for all rows of its bucket, used or
not."""
BUSY_SIZES = (64, 128, 256, 512, 1024)
"""Tokens of the buckets that have the maximum number of rows, for passes with prompts and many decode rows."""
MAX_DECODED_TOKENS = 4096
"""Maximum context, in tokens, of a decode row in a prompt bucket, where one kernel program reads all of it."""


def prompt_shapes(chunk_tokens: int, max_rows: int) -> list[tuple[int, int]]:
    """Returns (tokens, rows) of each bucket, ascending."""
    few = {(min(size, chunk_tokens), FEW_ROWS) for size in SIZES}
    busy = {(min(size, chunk_tokens), max_rows) for size in BUSY_SIZES}
    return sorted({(tokens, min(tokens, rows, max_rows)) for tokens, rows in few | busy})


class PromptBucket:
    """Memory and captured work for passes of at most `tokens` tokens in at most `rows` rows. Decode rows are computed
    as chunks of one token."""

    stretch = STRETCH_LAYERS

    def __init__(
        self, tokens: int, rows: int, shape: DecodeShape, decoder: Decoder, current: Current, stream: Stream
    ) -> None:
        self.tokens, self.rows = tokens, rows
        self.in_use = False
        """True while a pass holds the bucket"""
        self._shape, self._decoder, self._current, self._stream = shape, decoder, current, stream
        self._spec = step_spec(tokens, self.rows, self.rows * shape.table_width)
        self._device = stream.empty(size_of(self._spec))
        self.fields = StepFields(**views(self._spec, self._device))
        weight = decoder.embed_tokens.weight
        residual, added = (weight.new_zeros(tokens, weight.shape[1]) for _ in range(2))
        self.hidden = HiddenState(residual, added)
        """hidden state after the pass's last stretch"""
        self._table = torch.zeros(self.rows, shape.table_width, dtype=torch.int32, device=weight.device)
        chunks = Rows(self.fields.context_len, self._table, self.fields.query_start)
        self.inputs = AttentionInputs(self.fields.positions, self.fields.slots, None, chunks, None)
        self._stretches: dict[bool, list[Work]] = {}
        self.handoff_layers: list[list[HandoffLayer]] = []
        """for each layer, its captures with the cuts of each set in HANDOFF_GROUPS; empty before
        `capture_handoff_layers`"""

    def fits(self, batch: StepBatch) -> bool:
        """Returns True if the bucket is free, and not so large for the batch that padding costs much."""
        decoded = max(batch.context_lens[: batch.n_decode], default=0)
        fits = batch.n_tokens <= self.tokens <= max(LIGHT_TOKENS, 2 * batch.n_tokens) and batch.n_rows <= self.rows
        return fits and not self.in_use and decoded <= MAX_DECODED_TOKENS

    @torch.inference_mode()
    def capture(self, open_add: OpenAdd) -> None:
        """Captures the stretches of layers, with adapters and without, on a pass of padding."""
        self._pad()
        adds = GroupLora(open_add(lora_batch(self.fields, CAPTURED_RANK), False))
        for adapted in (False, True):
            lora = adds if adapted else None
            self._stretches[adapted] = [
                self._stream.capture(partial(self._compute, lora, begin))
                for begin in range(0, len(self._decoder.layers), self.stretch)
            ]

    @torch.inference_mode()
    def capture_handoff_layers(self, buffers: PieceBuffers) -> None:
        """Captures each layer in the pieces between its handoffs, on a pass of padding."""
        self._pad()
        self.handoff_layers = [
            [self._handoff_layer(buffers, index, groups) for groups in HANDOFF_GROUPS]
            for index in range(len(self._decoder.layers))
        ]

    @torch.inference_mode()
    def send(self, batch: StepBatch, lora: LoraBatch | None) -> None:
        """Enqueues the batch's copy to the device."""
        host = self._stream.host(size_of(self._spec))
        blocks = fill(StepFields(**views(self._spec, host)), batch, lora, self._shape.block_tokens)
        self._stream.upload(self._device, host, size_of(self._spec, "blocks") + blocks * self.fields.blocks.itemsize)

    @torch.inference_mode()
    def enqueue(self, layer: int, adapted: bool) -> None:
        """Enqueues the stretch that begins with this layer."""
        self._stretches[adapted][layer // self.stretch]()

    @torch.inference_mode()
    def enqueue_handoff_layer(self, layer: int, lora: ArrivingLora, tokens: int) -> None:
        """Enqueues one layer of a pass of `tokens`, with LoRA from the device or from CPU workers."""
        pieces = next(each for each in self.handoff_layers[layer] if each.covers(lora))
        pieces.enqueue(lora, tokens)

    def begin(self, layer: int) -> HiddenState:
        """Returns the hidden state before layer `layer`. This work is captured together with that layer."""
        if layer == 0:
            self._table.copy_(expand_blocks(self.fields, self._shape.table_width))
            self.hidden.residual.copy_(self._decoder.begin(self.fields.token_ids).residual)
        return HiddenState(self.hidden.residual, self.hidden.added if layer else None)

    def end(self, hidden: HiddenState) -> None:
        """Stores the hidden state that the layers have computed since `begin`. This work is captured together with the
        last of them."""
        assert hidden.added is not None and self.hidden.added is not None
        self.hidden.added.copy_(hidden.added)

    def _compute(self, lora: GroupLora | None, begin: int) -> None:
        hidden = self.begin(begin)
        self._current.lora = lora
        self._decoder.advance(hidden, self._decoder.layers[begin : begin + self.stretch], self.inputs)
        self._current.lora = None
        self.end(hidden)

    def _handoff_layer(self, buffers: PieceBuffers, index: int, groups: tuple[str, ...]) -> HandoffLayer:
        return HandoffLayer(self._decoder, self, index, groups, buffers.of(self.tokens), self._stream)

    def _pad(self) -> None:
        """Enqueues the copy of a batch of padding."""
        host = self._stream.host(size_of(self._spec)).zero_()
        fields = StepFields(**views(self._spec, host))
        for name in ("slots", "fed", "seg_slot", "token_slot"):
            getattr(fields, name).fill_(-1)
        self._stream.upload(self._device, host, host.shape[0])


def handoff_buckets(buckets: Sequence[PromptBucket], layers: int) -> list[PromptBucket]:
    """Returns the buckets, in ascending order, in which prompts with handoffs are captured.

    They have few rows, and no more tokens than CPU workers can help with; MAX_GRAPHS limits their number.
    """
    few = [bucket for bucket in buckets if bucket.rows <= FEW_ROWS and bucket.tokens <= LIGHT_TOKENS]
    return few[: MAX_GRAPHS // (layers * GRAPHS_PER_LAYER)]
