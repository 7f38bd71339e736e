"""Decode steps of a bucket of rows: one copy to the device, captured work, and one copy back.

A bucket owns its blocks of memory. It is captured once per kind of step: with and without adapters, greedy or not.
Unused rows of a step are padding, which has no context and writes nothing to the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from kernels.gpu_ops import Rows
from node_agent.device_event import ENDED, Event
from node_agent.runner.cuda_blocks import (
    OutFields,
    Spec,
    StepFields,
    download,
    expand_blocks,
    fill,
    lora_batch,
    out_spec,
    size_of,
    step_spec,
    views,
)
from node_agent.runner.cuda_layers import AttentionInputs, Decoder
from node_agent.runner.cuda_lora import CAPTURED_RANK, OpenAdd
from node_agent.runner.cuda_sampler import ScoreChanges, sample
from node_agent.runner.cuda_stream import Stream, Work
from node_agent.runner.lora import GroupLora
from node_agent.runner.projections import Current
from node_agent.types import LoraBatch, StepBatch

STEPS_UNDER_WAY = 2
"""Steps of a bucket that may be enqueued at once: one runs while the host enqueues the next."""
SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 8
"""Difference in rows between two successive buckets above 8 rows."""


@dataclass(frozen=True)
class DecodeShape:
    """Limits and sizes that all buckets of a runner share."""

    max_rows: int
    max_context: int
    block_tokens: int
    vocab: int

    @property
    def table_width(self) -> int:
        """Number of KV blocks of the longest context."""
        return -(-self.max_context // self.block_tokens)


def bucket_sizes(max_rows: int) -> list[int]:
    """Returns the number of rows of each bucket: 1, 2, 4, 8, multiples of 8 below `max_rows`, and `max_rows`."""
    sizes = [*SMALL_BUCKETS, *range(SMALL_BUCKETS[-1] + BUCKET_STEP, max_rows, BUCKET_STEP), max_rows]
    return sorted({min(size, max_rows) for size in sizes})


class HostBlocks:
    """Memory of one step on the host, for inputs and outputs."""

    def __init__(self, stream: Stream, spec: Spec, out_spec: Spec) -> None:
        self.block, self.out_block = stream.host(size_of(spec)), stream.host(size_of(out_spec))
        self.fields, self.out = StepFields(**views(spec, self.block)), OutFields(**views(out_spec, self.out_block))
        self.sent: Event = ENDED
        """event after the last copy from `block` to the device"""


class LastStep:
    """Logits and chosen tokens of the last step of any bucket, on the device."""

    def __init__(self, max_rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.logits = torch.zeros(max_rows, vocab, dtype=dtype, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """i64[max_rows]: chosen tokens; the next step takes them from here if the host does not have them yet"""


class Bucket:
    """Memory and captured work for decode steps of at most `rows` rows. Two steps may be enqueued at once.

    On the host the two steps have separate memory. On the device they share it: each step has read the memory before
    the next one writes to it.
    """

    def __init__(
        self, rows: int, shape: DecodeShape, decoder: Decoder, current: Current, stream: Stream, last: LastStep
    ) -> None:
        self.rows, self.shape, self.stream = rows, shape, stream
        self._decoder, self._current, self._last = decoder, current, last
        self._spec = step_spec(rows, rows, rows * shape.table_width)
        self._out_spec = out_spec(rows, shape.vocab)
        size, out_size = size_of(self._spec), size_of(self._out_spec)
        self._device, self._out_device = stream.empty(size), stream.empty(out_size)
        self.fields = StepFields(**views(self._spec, self._device))
        self._out = OutFields(**views(self._out_spec, self._out_device))
        self._hosts = [HostBlocks(stream, self._spec, self._out_spec) for _ in range(STEPS_UNDER_WAY)]
        self._slot = 0
        self._scratch = decoder.attention_scratch(rows, shape.max_context)
        self._bodies: dict[bool, Work] = {}
        self._samplers: dict[bool, Work] = {}

    @torch.inference_mode()
    def capture(self, open_add: OpenAdd) -> None:
        """Captures the bucket's work on a step of padding."""
        host = self._hosts[0]
        host.block.zero_()
        for name in ("slots", "fed", "seg_slot", "token_slot"):
            getattr(host.fields, name).fill_(-1)
        self.stream.upload(self._device, host.block, host.block.shape[0])
        adds = GroupLora(open_add(lora_batch(self.fields, CAPTURED_RANK), True))
        for adapted in (False, True):
            self._bodies[adapted] = self.stream.capture(partial(self._compute_logits, adds if adapted else None))
        for everything in (False, True):
            self._samplers[everything] = self.stream.capture(partial(self._sample, everything, None))

    @torch.inference_mode()
    def compute(self, batch: StepBatch, lora: LoraBatch | None) -> None:
        """Enqueues a step up to its logits. The tensors of `batch` and `lora` are in host memory."""
        self._slot = (self._slot + 1) % STEPS_UNDER_WAY
        host = self._hosts[self._slot]
        host.sent.synchronize()  # does not block: all steps since then but one were awaited
        blocks = fill(host.fields, batch, lora, self.shape.block_tokens)
        size = size_of(self._spec, "blocks") + blocks * self.fields.blocks.itemsize
        self.stream.upload(self._device, host.block, size)
        host.sent = self.stream.event()
        self._bodies[lora is not None]()

    @torch.inference_mode()
    def choose(self, everything: bool, changes: ScoreChanges | None) -> tuple[OutFields, Event]:
        """Enqueues the choice of the step's tokens. Returns the fields in host memory that will have them, and the
        event after their copy.

        `everything`: whether rows may sample and have log probabilities; if not, all are greedy.
        """
        if changes is None:
            self._samplers[everything]()
        else:  # its sizes depend on the requests' rules, so it can't be captured
            self.stream.enqueue(partial(self._sample, everything, changes))
        host = self._hosts[self._slot]
        return host.out, download(self.stream, self._out_spec, host.out_block, self._out_device, everything)

    def _compute_logits(self, lora: GroupLora | None) -> None:
        fields, decoder = self.fields, self._decoder
        rows = Rows(fields.context_len, expand_blocks(fields, self.shape.table_width))
        inputs = AttentionInputs(fields.positions, fields.slots, rows, None, self._scratch)
        fed_tokens = self._last.tokens.index_select(0, fields.fed.clamp(min=0))
        hidden = decoder.begin(torch.where(fields.fed >= 0, fed_tokens, fields.token_ids))
        self._current.lora = lora
        decoder.advance(hidden, decoder.layers, inputs)
        self._current.lora = None
        self._last.logits[: self.rows].copy_(decoder.logits(hidden, None))

    def _sample(self, everything: bool, changes: ScoreChanges | None) -> None:
        sample(self._last.logits[: self.rows], self.fields, changes, self._out, everything)
        self._last.tokens[: self.rows].copy_(self._out.ids)
