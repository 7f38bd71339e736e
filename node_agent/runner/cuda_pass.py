"""Passes of `node.runner: cuda`: captured decode steps, prompts captured in stretches, and others by single kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from kernels.gpu_ops import Rows
from node_agent.device_event import ENDED, Event
from node_agent.runner.cuda_blocks import (
    OutFields,
    StepFields,
    download,
    expand_blocks,
    fill,
    out_spec,
    send,
    size_of,
    step_spec,
    views,
)
from node_agent.runner.cuda_decode import Bucket
from node_agent.runner.cuda_layers import AttentionInputs, CudaModel
from node_agent.runner.cuda_lora import SentLora
from node_agent.runner.cuda_prompts import PromptBucket
from node_agent.runner.cuda_sampler import (
    ScoreChanges,
    join_edits,
    pack_scores,
    sample,
    score_spec,
    unpack_scores,
)
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.sampler import GREEDY_BELOW, Logprobs
from node_agent.runner.score_rules import ScoreEdits
from node_agent.runner.token_masks import TokenMasks, join_masks
from node_agent.types import ArrivingLora, PassLora, SamplingBatch, ScoredToken, StepBatch


class CudaOutput:
    """StepOutput in host memory. The step after the next one overwrites it."""

    def __init__(
        self, done: Event, out: OutFields | None, logprobs: list[int], scores: Callable[[], list[ScoredToken]]
    ) -> None:
        """`out`: None if no row needs logits. `logprobs`: as in SamplingBatch, for the rows that need logits."""
        self.done, self._out, self._logprob_counts, self._scores = done, out, logprobs, scores

    @cached_property
    def token_ids(self) -> torch.Tensor:
        if self._out is None:
            return torch.empty(0, dtype=torch.int64)
        return self._out.ids[: len(self._logprob_counts)].clone()

    @cached_property
    def non_finite(self) -> frozenset[int]:
        flags = [] if self._out is None else self._out.finite[: len(self._logprob_counts)].tolist()
        return frozenset(row for row, finite in enumerate(flags) if not finite)

    @cached_property
    def logprobs(self) -> list[Logprobs | None]:
        entries: list[Logprobs | None] = [None] * len(self._logprob_counts)
        for row, k in enumerate(self._logprob_counts):
            if k >= 0:
                assert self._out is not None
                ids, values = self._out.top_ids[row].tolist(), self._out.top_values[row].tolist()
                entries[row] = (float(self._out.chosen[row]), list(zip(ids, values, strict=True))[:k])
        return entries

    @cached_property
    def prompt_scores(self) -> list[ScoredToken]:
        return self._scores()


class CapturedPass:
    """Decode step in a bucket. All of its work is enqueued when `advance` reaches the last layer."""

    def __init__(self, model: CudaModel, bucket: Bucket, batch: StepBatch, lora: SentLora | None) -> None:
        self._model, self._bucket, self._batch, self._lora = model, bucket, batch, lora
        self.layer, self.stretch = 0, model.num_layers

    def advance(self, to_layer: int) -> None:
        if self.layer < to_layer == self._model.num_layers:
            self._bucket.compute(self._batch, None if self._lora is None else self._lora.batch)
        self.layer = max(self.layer, to_layer)

    def finish(self) -> CudaOutput:
        self._model.check_complete(self.layer)
        sampling = self._batch.sampling
        changes = send_changes(self._model.stream, sampling, self._model.vocab)
        out, done = self._bucket.choose(wants_everything(sampling), changes)
        return CudaOutput(done, out, sampling.logprobs, list)

    def abort(self) -> Event:
        return self._model.stream.event() if self.layer == self._model.num_layers else ENDED


class LayeredPass:
    """Pass of any StepBatch, kernel by kernel. It has its own memory, so that other passes may run between its
    layers."""

    stretch: int = 1

    @torch.inference_mode()
    def __init__(self, model: CudaModel, batch: StepBatch, lora: PassLora | None) -> None:
        if batch.fed is not None:
            raise RuntimeError("only captured steps take tokens of the previous step")
        self._model, self._batch, self._lora, self.layer = model, batch, lora, 0
        stream, blocks = model.stream, sum(-(-context // model.block_tokens) for context in batch.context_lens)
        scored = 0 if batch.scoring is None else batch.scoring.rows.shape[0]
        spec = step_spec(batch.n_tokens, batch.n_rows, blocks, scored)
        size = size_of(spec)
        host, device = stream.host(size), stream.empty(size)
        sent = lora if isinstance(lora, SentLora) else None
        fill(StepFields(**views(spec, host)), batch, None if sent is None else sent.batch, model.block_tokens)
        stream.upload(device, host, size)
        self._fields = StepFields(**views(spec, device))
        if sent is not None:
            sent.place(self._fields)
        self._inputs = self._plan()
        self._hidden = model.decoder.begin(self._fields.token_ids)

    @torch.inference_mode()
    def advance(self, to_layer: int) -> None:
        model = self._model
        model.current.lora = self._lora
        model.decoder.advance(self._hidden, model.decoder.layers[self.layer : to_layer], self._inputs)
        model.current.lora = None
        self.layer = max(self.layer, to_layer)

    def logits(self) -> torch.Tensor:
        """Returns logits [Q, V] of `logit_rows`, in the model's dtype, after the last layer."""
        return self._logits_of(self._fields.logit_rows[: self._batch.logit_rows.shape[0]])

    @torch.inference_mode()
    def finish(self) -> CudaOutput:
        self._model.check_complete(self.layer)
        sampling, scores, out = self._batch.sampling, self._send_scores(), None
        done = None
        if sampling.temperature:
            changes = send_changes(self._model.stream, sampling, self._model.vocab)
            out, done = self._choose(sampling, changes)
        return CudaOutput(done or self._model.stream.event(), out, sampling.logprobs, scores)

    def abort(self) -> Event:
        self._hidden.residual = self._hidden.residual[:0]
        self._hidden.added = None
        return self._model.stream.event()

    def _plan(self) -> AttentionInputs:
        batch, fields, model = self._batch, self._fields, self._model
        n, table = batch.n_decode, expand_blocks(self._fields, batch.block_table.shape[1])
        decode = chunks = scratch = None
        if n:
            decode = Rows(fields.context_len[:n], table[:n])
            scratch = model.decoder.attention_scratch(n, max(batch.context_lens[:n]))
        if n < batch.n_rows:
            chunks = Rows(fields.context_len[n:], table[n:], fields.query_start[n:])
        return AttentionInputs(fields.positions, fields.slots, decode, chunks, scratch)

    def _choose(self, sampling: SamplingBatch, changes: ScoreChanges | None) -> tuple[OutFields, Event]:
        stream, everything = self._model.stream, wants_everything(sampling)
        spec = out_spec(self._batch.logit_rows.shape[0], self._model.vocab)
        host, device = stream.host(size_of(spec)), stream.empty(size_of(spec))
        out = OutFields(**views(spec, device))
        stream.enqueue(lambda: sample(self.logits(), self._fields, changes, out, everything))
        return OutFields(**views(spec, host)), download(stream, spec, host, device, everything)

    def _send_scores(self) -> Callable[[], list[ScoredToken]]:
        """Enqueues the requested log probabilities of prompt tokens, and returns the function that reads them."""
        scoring, stream = self._batch.scoring, self._model.stream
        if scoring is None:
            return list
        spec = score_spec(len(scoring.top), max(scoring.top), self._model.vocab)
        host, device = stream.host(size_of(spec)), stream.empty(size_of(spec))
        pack_scores(self._logits_of, self._fields, views(spec, device)["packed"])
        stream.download(host, device, size_of(spec))
        return lambda: unpack_scores(views(spec, host)["packed"], scoring.top)

    @torch.inference_mode()
    def _logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        self._model.check_complete(self.layer)
        return self._model.decoder.logits(self._hidden, rows)


class PromptPass(LayeredPass):
    """Pass with prompts in the memory of a bucket. It holds the bucket until its end."""

    def __init__(
        self,
        model: CudaModel,
        bucket: PromptBucket,
        batch: StepBatch,
        lora: SentLora | None,
        arriving: ArrivingLora | None,
    ) -> None:
        """`arriving`: set if the adapter of `lora` is still loading."""
        self._model, self._batch, self._arriving, self.layer = model, batch, arriving, 0
        self._fields, self._hidden, self._adapted = bucket.fields, bucket.hidden, lora is not None
        self._bucket: PromptBucket | None = bucket
        self.stretch = bucket.stretch
        bucket.send(batch, None if lora is None else lora.batch)
        bucket.in_use = True

    def advance(self, to_layer: int) -> None:
        layers = self._model.num_layers
        while self.layer < (end := min(self.layer + self.stretch, layers)) <= to_layer:
            assert self._bucket is not None
            if self._arriving is not None:
                for layer in range(self.layer, end):
                    self._arriving.claim(layer)
            self._bucket.enqueue(self.layer, self._adapted)
            self.layer = end

    def finish(self) -> CudaOutput:
        output = super().finish()
        self._release_bucket()
        return output

    def abort(self) -> Event:
        self._release_bucket()
        return self._model.stream.event()

    def _release_bucket(self) -> None:
        """Releases the bucket for later passes, whose work runs on the device after this pass's."""
        if self._bucket is not None:
            self._bucket.in_use, self._bucket = False, None


class HandoffPass(PromptPass):
    """Pass with prompts in the memory of a bucket, in which CPU workers compute the LoRA of some layers."""

    def __init__(
        self, model: CudaModel, bucket: PromptBucket, batch: StepBatch, lora: SentLora | None, arriving: ArrivingLora
    ) -> None:
        super().__init__(model, bucket, batch, lora, None)
        self._assisted_lora, self._stretch_layers = arriving, bucket.stretch
        self.stretch = 1

    def advance(self, to_layer: int) -> None:
        """Enqueues the layers up to `to_layer`. Stretches whose adapter layers are all on the device are enqueued as a
        whole, other layers one by one."""
        while self.layer < to_layer:
            assert self._bucket is not None
            end = min(self.layer + self._stretch_layers, self._model.num_layers)
            is_full_stretch = self.layer % self._stretch_layers == 0 and end <= to_layer
            if is_full_stretch and all(self._assisted_lora.claim(layer) for layer in range(self.layer, end)):
                self._bucket.enqueue(self.layer, self._adapted)
                self.layer = end
            else:
                self._bucket.enqueue_handoff_layer(self.layer, self._assisted_lora, self._batch.n_tokens)
                self.layer += 1


def wants_everything(sampling: SamplingBatch) -> bool:
    """Returns whether any row is sampled (not greedy) or requests log probabilities."""
    return any(t >= GREEDY_BELOW for t in sampling.temperature) or any(k >= 0 for k in sampling.logprobs)


def send_changes(stream: Stream, sampling: SamplingBatch, vocab: int) -> ScoreChanges | None:
    """Enqueues the copy of the rows' changes to their logits to the device, and returns them. Returns None if no row
    has rules or a grammar."""
    edits = masks = None
    if sampling.rules:
        joined = join_edits({row: rules.edits() for row, rules in sampling.rules.items()}, vocab)
        edits = ScoreEdits(**send(stream, joined))
    if sampling.masks:
        masks = TokenMasks(**send(stream, join_masks(sampling.masks)))
    return ScoreChanges(edits, masks) if edits or masks else None
