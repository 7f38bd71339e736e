"""Whether `node.runner: cuda` computes what the transformers runner does: asked at each start, of the model itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cluster.messages import Sampling
from node_agent.engine.batch import Row, build_step
from node_agent.engine.request import Request
from node_agent.runner.cuda_decode import Bucket
from node_agent.runner.cuda_handoffs import HANDED_OVER
from node_agent.runner.cuda_layers import CudaModel
from node_agent.runner.cuda_pass import HandedPass, LayeredPass, PromptPass
from node_agent.runner.cuda_prompts import PromptBucket
from node_agent.runner.lora import NoHandoffs
from node_agent.runner.transformers_runner import TransformersRunner
from node_agent.types import StepBatch

PROMPT = 6
"""Tokens that are computed before the decode step that is compared."""
CHECK_BLOCKS = 2 + PROMPT
"""KV blocks that are enough for them whatever a block's size, with block 0."""
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of the largest logit, times the square root of the layers: each rounds its sums, in an order of its own, and such
errors add like steps of a walk. A 7B with drawn weights lies half as far off; a layer with a wrong position, head or
weight lies about the largest logit off, over the square root of the layers."""


def check_runner(reference: TransformersRunner, runner: CudaModel) -> str | None:
    """Computes a prompt and a decode step by both. Returns what differs, or why a kernel can't be compiled for this
    GPU; None: nothing is wrong. Raises RuntimeError for what else goes wrong: nobody could compute here then."""
    try:
        return _difference(reference, runner)
    except Exception as error:  # Triton's errors have no base that a host without Triton could name
        if not _is_compile_error(error):
            raise
        return f"a kernel can't be compiled for this GPU: {type(error).__name__}: {error}"


def _is_compile_error(error: Exception) -> bool:
    return type(error).__module__.startswith("triton.") or "PassManager::run failed" in str(error)


def _difference(reference: TransformersRunner, runner: CudaModel) -> str | None:
    prompt = _length(runner.block_tokens, runner.num_blocks)
    for begin, end in ((0, prompt), (prompt, prompt + 1)):
        wanted, found = (
            _logits(reference, step(begin, end, reference.block_tokens, reference.device)),
            _logits(runner, step(begin, end, runner.block_tokens, torch.device("cpu"))),
        )
        problem = compare(wanted, found, runner.num_layers)
        if problem is not None:
            return f"{'a decode step' if begin else f'a prompt of {prompt} tokens'}: {problem}"
    return None


def check_captured(runner: CudaModel, bucket: Bucket, logits: torch.Tensor) -> str | None:
    """Computes a decode step behind a prompt, captured and not; `logits` is where buckets write theirs. Returns what
    differs; None: nothing does."""
    prompt = _length(runner.block_tokens, runner.num_blocks)
    batch = step(prompt, prompt + 1, runner.block_tokens, torch.device("cpu"))
    _logits(runner, step(0, prompt, runner.block_tokens, torch.device("cpu")))
    wanted = _logits(runner, batch)
    bucket.compute(batch, None)
    return compare(wanted, logits[:1].clone(), runner.num_layers)


def check_prompts(runner: CudaModel, buckets: Sequence[PromptBucket]) -> str | None:
    """Computes a prompt by each bucket and by none. Returns what differs; None: nothing does."""
    prompt = _length(runner.block_tokens, runner.num_blocks)
    batch = step(0, prompt, runner.block_tokens, torch.device("cpu"))
    wanted = _logits(runner, batch)
    for bucket in buckets:
        problem = _compare_prompt(runner, PromptPass(runner, bucket, batch, None, None), wanted)
        if problem is not None:
            return f"a prompt in a bucket of {bucket.tokens} tokens and {bucket.rows} rows: {problem}"
    return None


def check_handoffs(runner: CudaModel, buckets: Sequence[PromptBucket]) -> str | None:
    """Computes a prompt by each bucket, in the pieces between handoffs, and by none. Returns what differs; None:
    nothing does."""
    prompt = _length(runner.block_tokens, runner.num_blocks)
    batch = step(0, prompt, runner.block_tokens, torch.device("cpu"))
    wanted = _logits(runner, batch)
    for bucket in buckets:
        for groups in HANDED_OVER:
            run = HandedPass(runner, bucket, batch, None, NoHandoffs(groups))
            problem = _compare_prompt(runner, run, wanted)
            if problem is not None:
                return f"a prompt in a bucket of {bucket.tokens} tokens, cut at {', '.join(groups)}: {problem}"
    return None


def _compare_prompt(runner: CudaModel, run: PromptPass, wanted: torch.Tensor) -> str | None:
    run.advance(runner.num_layers)
    problem = compare(wanted, run.logits(), runner.num_layers)
    run.abort()
    return problem


def compare(wanted: torch.Tensor, found: torch.Tensor, layers: int) -> str | None:
    """Logits [Q, V] of two runners of a model of so many layers. Returns how far they lie apart if that is too far,
    else None."""
    largest, apart = float(wanted.float().abs().max()), float((wanted.float() - found.float()).abs().max())
    if apart <= TOLERANCE[wanted.dtype] * math.sqrt(layers) * largest:
        return None
    return f"logits of up to {largest:.4g} lie {apart:.4g} apart"


def step(begin: int, end: int, block_tokens: int, device: torch.device) -> StepBatch:
    """One greedy row, of which the tokens [begin, end) are computed; one that is computed alone decodes."""
    tokens, blocks = list(range(1, end + 1)), list(range(1, -(-end // block_tokens) + 1))
    request = Request("check", "", tokens, 1, Sampling(temperature=0.0), 0.0, None, ignore_eos=True, blocks=blocks)
    request.computed = begin
    return build_step([Row(request, end - begin)], int(begin > 0), block_tokens, device)


def _length(block_tokens: int, num_blocks: int) -> int:
    """Tokens of the prompt: with the one behind it they must fit into the cache."""
    return max(1, min(PROMPT, (num_blocks - 1) * block_tokens - 1))


def _logits(runner: TransformersRunner | CudaModel, batch: StepBatch) -> torch.Tensor:
    run = runner.start(batch, None) if isinstance(runner, TransformersRunner) else LayeredPass(runner, batch, None)
    run.advance(runner.num_layers)
    return run.logits()
