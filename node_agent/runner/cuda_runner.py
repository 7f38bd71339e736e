"""`node.runner: cuda`: captured decode steps, one copy each way per pass, and no wait for the device within a pass.

Without a GPU the same code runs on a CPU, with plain torch for the kernels and function calls for the graphs.
"""

from __future__ import annotations

import gc
import logging

from node_agent.adapter_memory.store import AdapterStore
from node_agent.device import is_out_of_memory
from node_agent.runner import transformers_runner
from node_agent.runner.cuda_check import CHECK_BLOCKS, check_captured, check_handoffs, check_prompts, check_runner
from node_agent.runner.cuda_decode import Bucket, DecodeShape, LastStep, bucket_sizes
from node_agent.runner.cuda_handoffs import allocate_buffers
from node_agent.runner.cuda_layers import CudaModel
from node_agent.runner.cuda_lora import CudaLora, OpenAdd, SentLora, open_add
from node_agent.runner.cuda_pass import CapturedPass, HandoffPass, LayeredPass, PromptPass
from node_agent.runner.cuda_prompts import PromptBucket, handoff_buckets, prompt_shapes
from node_agent.runner.cuda_stream import Stream, open_stream
from node_agent.runner.lora_choice import StartLora
from node_agent.runner.transformers_runner import LoadModel, TransformersRunner, load_model
from node_agent.types import ArrivingLora, ModelRunner, PassLora, RunnerSettings, StepBatch

log = logging.getLogger(__name__)


def open_runner(settings: RunnerSettings, load: LoadModel = load_model) -> ModelRunner:
    """Opens the runner, as an OpenRunner. Raises ValueError for a model that it can't compute.

    If the transformers runner computes other logits for the model, an error is logged and that runner is opened.
    """
    reference = TransformersRunner(
        load(settings.model_dir, settings.device, settings.dtype), settings.block_tokens, CHECK_BLOCKS, compiled=False
    )
    stream = open_stream(settings.device)
    runner = CudaRunner(reference, stream, settings.block_tokens, settings.num_blocks(reference.dtype))
    problem = check_runner(reference, runner)
    if problem is None:
        return runner
    log.error("node.runner: transformers serves, because cuda can't be used", extra={"reason": problem})
    del reference, runner  # frees their memory, since the next runner measures what is free
    gc.collect()
    return transformers_runner.open_runner(settings, load)


class CudaRunner(CudaModel):
    """SendingRunner that chooses the kind of each pass: captured, or by single kernels."""

    name = "cuda"

    def __init__(self, model: TransformersRunner, stream: Stream, block_tokens: int, num_blocks: int) -> None:
        super().__init__(model, stream, block_tokens, num_blocks)
        self.buckets: list[Bucket] = []
        """decode buckets by size; empty before `serve`"""
        self.prompts: list[PromptBucket] = []
        """prompt buckets by size; empty before `serve`"""

    @property
    def feeds(self) -> bool:
        return bool(self.buckets)

    def serve(
        self, store: AdapterStore, kernel: str, *, max_rows: int, chunk_tokens: int, max_context: int
    ) -> StartLora:
        lora = CudaLora(store, self.stream, open_add(store, kernel, max_rows, max(max_rows, chunk_tokens)))
        shape = DecodeShape(max_rows, max_context, self.block_tokens, self.vocab)
        self.buckets = self._capture_steps(shape, lora.open_add)
        if self.buckets:
            self.prompts = self._capture_prompts(shape, lora.open_add, chunk_tokens)
        return lora.start

    def start(self, batch: StepBatch, lora: PassLora | None) -> CapturedPass | LayeredPass:
        """Starts a pass. Tensors of the batch and of the LoRA are in host memory."""
        arriving = lora if isinstance(lora, ArrivingLora) else None
        sent = lora if arriving is None else arriving.on_device
        if batch.scoring is None and (sent is None or isinstance(sent, SentLora)):
            hands_over = arriving is not None and arriving.hands_over
            bucket, prompts = self._bucket(batch), self._prompts(batch, hands_over)
            if bucket is not None and arriving is None:
                return CapturedPass(self, bucket, batch, sent)
            if prompts is not None and arriving is not None and hands_over:
                return HandoffPass(self, prompts, batch, sent, arriving)
            if prompts is not None:
                return PromptPass(self, prompts, batch, sent, arriving)
        return LayeredPass(self, batch, lora)

    def capture_handoffs(self) -> None:
        """Captures prompts in the pieces between their handoffs.

        If that fails, or they compute other logits, an error is logged and such prompts run kernel by kernel.
        """
        buckets = handoff_buckets(self.prompts, self.num_layers)
        if not buckets:
            return
        try:
            buffers = allocate_buffers(self.decoder, buckets[-1].tokens)
            for bucket in reversed(buckets):
                bucket.capture_handoff_layers(buffers)
            problem = check_handoffs(self, buckets)
        except RuntimeError as error:
            problem = str(error)
        if problem is not None:
            for bucket in buckets:
                bucket.handoff_layers = []
            log.error("prompts with handoffs run without a CUDA graph, and take longer", extra={"reason": problem})

    def _capture_steps(self, shape: DecodeShape, open_add: OpenAdd) -> list[Bucket]:
        """Captures decode steps, and returns their buckets. Returns no bucket, and logs the reason, if memory is short
        or the captured steps compute other logits. Raises RuntimeError if they can't be captured for another reason."""
        buckets, last = list[Bucket](), LastStep(shape.max_rows, self.vocab, self.dtype, self.device)
        try:
            for rows in reversed(bucket_sizes(shape.max_rows)):  # largest first: smaller graphs reuse its memory
                buckets.insert(0, Bucket(rows, shape, self.decoder, self.current, self.stream, last))
                buckets[0].capture(open_add)
            problem = check_captured(self, buckets[0], last.logits)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                what = f"node.runner: cuda can't capture decode steps of {rows} rows"
                raise RuntimeError(f"{what}: {error}; set node.runner: transformers") from error
            problem = f"{error}; fewer node.max_rows, or less node.kv_memory, leave more"
        if problem is None:
            return buckets
        log.error("decode steps run without a CUDA graph, and take longer", extra={"reason": problem})
        return []

    def _capture_prompts(self, shape: DecodeShape, open_add: OpenAdd, chunk_tokens: int) -> list[PromptBucket]:
        """Captures prompts, and returns their buckets. Returns no bucket, and logs the reason, if memory is short or
        the captured prompts compute other logits. Raises RuntimeError if they can't be captured for another reason."""
        problem, buckets = None, list[PromptBucket]()
        try:
            for tokens, rows in reversed(
                prompt_shapes(chunk_tokens, shape.max_rows)
            ):  # largest first, as for decode steps
                buckets.insert(0, PromptBucket(tokens, rows, shape, self.decoder, self.current, self.stream))
                buckets[0].capture(open_add)
            problem = check_prompts(self, buckets)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise RuntimeError(
                    f"node.runner: cuda can't capture prompts: {error}; set node.runner: transformers"
                ) from error
            problem = str(error)
        if problem is None:
            return buckets
        log.error("prompts run without a CUDA graph, and take longer", extra={"reason": problem})
        return []

    def _bucket(self, batch: StepBatch) -> Bucket | None:
        """Returns the smallest decode bucket for the batch. Returns None if a row is not a decode row, or if no bucket
        is large enough."""
        if batch.n_decode < batch.n_rows:
            return None
        return next((bucket for bucket in self.buckets if bucket.rows >= batch.n_rows), None)

    def _prompts(self, batch: StepBatch, hands_over: bool) -> PromptBucket | None:
        """Returns the smallest free prompt bucket for the batch; None if there is none. `hands_over`: whether the
        bucket must have layers captured in the pieces between handoffs."""
        buckets = [bucket for bucket in self.prompts if bucket.handoff_layers or not hands_over]
        return next((bucket for bucket in buckets if batch.fed is None and bucket.fits(batch)), None)
