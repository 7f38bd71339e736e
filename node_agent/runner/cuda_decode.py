"""Decode steps of a bucket of rows: one copy to the device, captured work, and one copy back.

A bucket owns its blocks of memory and is captured once per kind of step, with adapters and without, greedy and not.
Rows that a step does not fill are padding: they have no context, and write nothing into the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.gpu_ops import Rows
from node_agent.device import ENDED, Event
from node_agent.runner.cuda_blocks import (
    OutFields,
    StepFields,
    expand_blocks,
    fill,
    lora_batch,
    out_spec,
    size_of,
    step_spec,
    views,
)
from node_agent.runner.cuda_layers import Attended, Decoder
from node_agent.runner.cuda_lora import CAPTURED_RANK, EveryGroup, OpenAdd
from node_agent.runner.cuda_output import download
from node_agent.runner.cuda_sampler import sample
from node_agent.runner.cuda_stream import Stream, Work
from node_agent.runner.projections import Current
from node_agent.runner.score_rules import ScoreEdits
from node_agent.types import LoraBatch, StepBatch

SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 8
"""Rows between larger buckets."""


@dataclass(frozen=True)
class DecodeShape:
    """What all buckets of a runner have in common."""

    max_rows: int
    max_context: int
    block_tokens: int
    num_blocks: int
    vocab: int

    @property
    def table_width(self) -> int:
        """Blocks of the longest context."""
        return -(-self.max_context // self.block_tokens)


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then every 8, up to `max_rows`, which is one itself."""
    sizes = [*SMALL_BUCKETS, *range(SMALL_BUCKETS[-1] + BUCKET_STEP, max_rows, BUCKET_STEP), max_rows]
    return sorted({min(size, max_rows) for size in sizes})


class Bucket:
    """Steps of at most `rows` decode rows."""

    def __init__(
        self, rows: int, shape: DecodeShape, decoder: Decoder, current: Current, stream: Stream, logits: torch.Tensor
    ) -> None:
        """`logits` [max_rows, V] is what all buckets write theirs to."""
        self.rows, self.shape, self.stream = rows, shape, stream
        self._decoder, self._current, self._logits = decoder, current, logits[:rows]
        # no two rows share a block, so all rows' blocks are no more than there are
        self._spec = step_spec(rows, rows, min(shape.num_blocks, rows * shape.table_width))
        self._out_spec = out_spec(rows, shape.vocab)
        size, out_size = size_of(self._spec), size_of(self._out_spec)
        self._host, self._device = stream.host(size), stream.empty(size)
        self._out_host, self._out_device = stream.host(out_size), stream.empty(out_size)
        self._host_fields = StepFields(**views(self._spec, self._host))
        self.fields = StepFields(**views(self._spec, self._device))
        self._out = OutFields(**views(self._out_spec, self._out_device))
        self.out = OutFields(**views(self._out_spec, self._out_host))
        self._scratch = decoder.attended_scratch(rows, shape.max_context)
        self._sent: Event = ENDED
        self._bodies: dict[bool, Work] = {}
        self._samplers: dict[bool, Work] = {}

    @torch.inference_mode()
    def capture(self, open_add: OpenAdd) -> None:
        """Captures the bucket's work, on a step of padding alone."""
        self._host.zero_()
        for name, padding in (("slots", -1), ("seg_slot", -1), ("token_slot", -1)):
            getattr(self._host_fields, name).fill_(padding)
        self.stream.upload(self._device, self._host, self._host.shape[0])
        adds = EveryGroup(open_add(lora_batch(self.fields, CAPTURED_RANK), True))
        self._bodies = {
            adapted: self.stream.capture(self._body(adds if adapted else None)) for adapted in (False, True)
        }
        self._samplers = {everything: self.stream.capture(self._sampler(everything)) for everything in (False, True)}

    @torch.inference_mode()
    def compute(self, batch: StepBatch, lora: LoraBatch | None) -> None:
        """Enqueues a step up to its logits."""
        self._sent.synchronize()  # long ago: the step before was awaited since
        blocks = fill(self._host_fields, batch, lora, self.shape.block_tokens)
        size = size_of(self._spec, "blocks") + blocks * self.fields.blocks.itemsize
        self.stream.upload(self._device, self._host, size)
        self._sent = self.stream.event()
        self._bodies[lora is not None]()

    @torch.inference_mode()
    def choose(self, everything: bool, edits: ScoreEdits | None) -> Event:
        """Enqueues the choice of the step's tokens, and their way to `out`, where they are at the event."""
        if edits is None:
            self._samplers[everything]()
        else:  # as many as the requests' rules have, so it can't be captured
            self._sample(everything, edits)
        return download(self.stream, self._out_spec, self._out_host, self._out_device, everything)

    def _body(self, lora: EveryGroup | None) -> Callable[[], None]:
        def body() -> None:
            fields, decoder = self.fields, self._decoder
            rows = Rows(fields.context_len, expand_blocks(fields, self.shape.table_width))
            attended = Attended(fields.positions, fields.slots, rows, None, self._scratch)
            walk = decoder.begin(fields.token_ids)
            self._current.lora = lora
            decoder.advance(walk, decoder.layers, attended)
            self._current.lora = None
            self._logits.copy_(decoder.logits(walk, None))

        return body

    def _sampler(self, everything: bool) -> Callable[[], None]:
        return lambda: self._sample(everything, None)

    def _sample(self, everything: bool, edits: ScoreEdits | None) -> None:
        sample(self._logits, self.fields, edits, self._out, everything)
