"""The passes of `node.runner: cuda`: captured decode steps, prompts captured in stretches, and all others, which are
enqueued kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from kernels.gpu_ops import Rows
from node_agent.device import ENDED, Event
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
from node_agent.runner.cuda_layers import Attended, CudaModel
from node_agent.runner.cuda_lora import SentLora
from node_agent.runner.cuda_prompts import PromptBucket
from node_agent.runner.cuda_sampler import (
    join_edits,
    pack_scores,
    sample,
    score_spec,
    unpack_scores,
)
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.sampler import GREEDY_BELOW, Logprobs
from node_agent.runner.score_rules import ScoreEdits
from node_agent.types import ArrivingLora, PassLora, SamplingBatch, ScoredToken, StepBatch


class CudaOutput:
    """A StepOutput. `out` lies in host memory, and is overwritten by the next step but one."""

    def __init__(
        self, done: Event, out: OutFields | None, logprobs: list[int], scores: Callable[[], list[ScoredToken]]
    ) -> None:
        """`out`: None where no row wants logits; `logprobs` as in SamplingBatch, one per row that does."""
        self.done, self._out, self._wanted, self._scores = done, out, logprobs, scores

    @cached_property
    def token_ids(self) -> torch.Tensor:
        if self._out is None:
            return torch.empty(0, dtype=torch.int64)
        return self._out.ids[: len(self._wanted)].clone()

    @cached_property
    def non_finite(self) -> frozenset[int]:
        flags = [] if self._out is None else self._out.finite[: len(self._wanted)].tolist()
        return frozenset(row for row, finite in enumerate(flags) if not finite)

    @cached_property
    def logprobs(self) -> list[Logprobs | None]:
        found: list[Logprobs | None] = [None] * len(self._wanted)
        for row, k in enumerate(self._wanted):
            if k >= 0:
                assert self._out is not None
                ids, values = self._out.top_ids[row].tolist(), self._out.top_values[row].tolist()
                found[row] = (float(self._out.chosen[row]), list(zip(ids, values, strict=True))[:k])
        return found

    @cached_property
    def prompt_scores(self) -> list[ScoredToken]:
        return self._scores()


class CapturedPass:
    """A decode step. It is enqueued as a whole, with its last layer."""

    def __init__(self, runner: CudaModel, bucket: Bucket, batch: StepBatch, lora: SentLora | None) -> None:
        self._runner, self._bucket, self._batch, self._lora = runner, bucket, batch, lora
        self.layer, self.stretch = 0, runner.num_layers

    def advance(self, to_layer: int) -> None:
        if self.layer < to_layer == self._runner.num_layers:
            self._bucket.compute(self._batch, None if self._lora is None else self._lora.batch)
        self.layer = max(self.layer, to_layer)

    def finish(self) -> CudaOutput:
        self._runner.check_complete(self.layer)
        ways = self._batch.sampling
        edits = send_edits(self._runner.stream, ways, self._runner.vocab)
        out, done = self._bucket.choose(wants_everything(ways), edits)
        return CudaOutput(done, out, ways.logprobs, list)

    def abort(self) -> Event:
        return self._runner.stream.event() if self.layer == self._runner.num_layers else ENDED


class LayeredPass:
    """Any StepBatch, over memory of its own: other passes may run between its layers."""

    stretch: int = 1

    @torch.inference_mode()
    def __init__(self, runner: CudaModel, batch: StepBatch, lora: PassLora | None) -> None:
        if batch.fed is not None:
            raise RuntimeError("only captured steps take tokens of the step before")
        self._runner, self._batch, self._lora, self.layer = runner, batch, lora, 0
        stream, blocks = runner.stream, sum(-(-context // runner.block_tokens) for context in batch.context_lens)
        scored = 0 if batch.scoring is None else batch.scoring.rows.shape[0]
        spec = step_spec(batch.n_tokens, batch.n_rows, blocks, scored)
        size = size_of(spec)
        host, device = stream.host(size), stream.empty(size)
        sent = lora if isinstance(lora, SentLora) else None
        fill(StepFields(**views(spec, host)), batch, None if sent is None else sent.batch, runner.block_tokens)
        stream.upload(device, host, size)
        self._fields = StepFields(**views(spec, device))
        if sent is not None:
            sent.place(self._fields)
        self._attended = self._plan()
        self._walk = runner.decoder.begin(self._fields.token_ids)

    @torch.inference_mode()
    def advance(self, to_layer: int) -> None:
        runner = self._runner
        runner.current.lora = self._lora
        runner.decoder.advance(self._walk, runner.decoder.layers[self.layer : to_layer], self._attended)
        runner.current.lora = None
        self.layer = max(self.layer, to_layer)

    def logits(self) -> torch.Tensor:
        """[Q, V] of `logit_rows`, in the model's dtype. All layers must have been advanced."""
        return self._logits_of(self._fields.logit_rows[: self._batch.logit_rows.shape[0]])

    @torch.inference_mode()
    def finish(self) -> CudaOutput:
        self._runner.check_complete(self.layer)
        ways, scores, out = self._batch.sampling, self._send_scores(), None
        done = None
        if ways.temperature:
            edits = send_edits(self._runner.stream, ways, self._runner.vocab)
            out, done = self._choose(ways, edits)
        return CudaOutput(done or self._runner.stream.event(), out, ways.logprobs, scores)

    def abort(self) -> Event:
        self._walk.residual = self._walk.residual[:0]
        self._walk.added = None
        return self._runner.stream.event()

    def _plan(self) -> Attended:
        batch, fields, runner = self._batch, self._fields, self._runner
        n, table = batch.n_decode, expand_blocks(self._fields, batch.block_table.shape[1])
        decode = chunks = scratch = None
        if n:
            decode = Rows(fields.context_len[:n], table[:n])
            scratch = runner.decoder.attended_scratch(n, max(batch.context_lens[:n]))
        if n < batch.n_rows:
            chunks = Rows(fields.context_len[n:], table[n:], fields.query_start[n:])
        return Attended(fields.positions, fields.slots, decode, chunks, scratch)

    def _choose(self, ways: SamplingBatch, edits: ScoreEdits | None) -> tuple[OutFields, Event]:
        stream, everything = self._runner.stream, wants_everything(ways)
        spec = out_spec(self._batch.logit_rows.shape[0], self._runner.vocab)
        host, device = stream.host(size_of(spec)), stream.empty(size_of(spec))
        out = OutFields(**views(spec, device))
        stream.enqueue(lambda: sample(self.logits(), self._fields, edits, out, everything))
        return OutFields(**views(spec, host)), download(stream, spec, host, device, everything)

    def _send_scores(self) -> Callable[[], list[ScoredToken]]:
        """Enqueues the log probabilities of prompt tokens, where they are wanted, and returns what reads them."""
        scoring, stream = self._batch.scoring, self._runner.stream
        if scoring is None:
            return list
        spec = score_spec(len(scoring.top), max(scoring.top), self._runner.vocab)
        host, device = stream.host(size_of(spec)), stream.empty(size_of(spec))
        pack_scores(self._logits_of, self._fields, views(spec, device)["packed"])
        stream.download(host, device, size_of(spec))
        return lambda: unpack_scores(views(spec, host)["packed"], scoring.top)

    @torch.inference_mode()
    def _logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        self._runner.check_complete(self.layer)
        return self._runner.decoder.logits(self._walk, rows)


class PromptPass(LayeredPass):
    """A StepBatch in a bucket's memory, which it has until it ends."""

    def __init__(
        self,
        runner: CudaModel,
        bucket: PromptBucket,
        batch: StepBatch,
        lora: SentLora | None,
        arriving: ArrivingLora | None,
    ) -> None:
        """`arriving`: where the adapter of `lora` is on its way."""
        self._runner, self._batch, self._arriving, self.layer = runner, batch, arriving, 0
        self._fields, self._walk, self._adapted = bucket.fields, bucket.walk, lora is not None
        self._bucket: PromptBucket | None = bucket
        self.stretch = bucket.stretch
        bucket.send(batch, None if lora is None else lora.batch)
        bucket.taken = True

    def advance(self, to_layer: int) -> None:
        layers = self._runner.num_layers
        while self.layer < (end := min(self.layer + self.stretch, layers)) <= to_layer:
            assert self._bucket is not None
            if self._arriving is not None:
                for layer in range(self.layer, end):
                    self._arriving.claim(layer)
            self._bucket.enqueue(self.layer, self._adapted)
            self.layer = end

    def finish(self) -> CudaOutput:
        output = super().finish()
        self._give_back()
        return output

    def abort(self) -> Event:
        self._give_back()
        return self._runner.stream.event()

    def _give_back(self) -> None:
        """What other passes enqueue from now on runs behind this one."""
        if self._bucket is not None:
            self._bucket.taken, self._bucket = False, None


class HandedPass(PromptPass):
    """A prompt in a bucket's memory, of whose adapter CPU workers add some layers."""

    def __init__(
        self, runner: CudaModel, bucket: PromptBucket, batch: StepBatch, lora: SentLora | None, arriving: ArrivingLora
    ) -> None:
        super().__init__(runner, bucket, batch, lora, None)
        self._handed, self._whole = arriving, bucket.stretch
        self.stretch = 1

    def advance(self, to_layer: int) -> None:
        """Whole stretches that are on the device are enqueued as such, all other layers one by one."""
        while self.layer < to_layer:
            assert self._bucket is not None
            end = min(self.layer + self._whole, self._runner.num_layers)
            whole = self.layer % self._whole == 0 and end <= to_layer
            if whole and all(self._handed.claim(layer) for layer in range(self.layer, end)):
                self._bucket.enqueue(self.layer, self._adapted)
                self.layer = end
            else:
                self._bucket.enqueue_handed(self.layer, self._handed, self._batch.n_tokens)
                self.layer += 1


def wants_everything(ways: SamplingBatch) -> bool:
    """Whether some row is not greedy, or asks for log probabilities."""
    return any(t >= GREEDY_BELOW for t in ways.temperature) or any(k >= 0 for k in ways.logprobs)


def send_edits(stream: Stream, ways: SamplingBatch, vocab: int) -> ScoreEdits | None:
    """Enqueues what the rows' rules make of their scores. None where no row has rules."""
    if not ways.rules:
        return None
    return ScoreEdits(**send(stream, join_edits({row: rules.edits() for row, rules in ways.rules.items()}, vocab)))
