"""Checks at each start that `node.runner: cuda` computes the logits of the transformers runner for the node's model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cluster.messages import Sampling
from node_agent.engine.batch import build_step
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.runner.cuda_decode import Bucket
from node_agent.runner.cuda_handoffs import HANDOFF_GROUPS
from node_agent.runner.cuda_layers import CudaModel
from node_agent.runner.cuda_pass import HandoffPass, LayeredPass, PromptPass
from node_agent.runner.cuda_prompts import PromptBucket
from node_agent.runner.lora import NoHandoffs
from node_agent.runner.transformers_runner import TransformersRunner
from node_agent.types import StepBatch

PROMPT = 6
"""Number of prompt tokens before the compared decode step; fewer if the cache is smaller."""
CHECK_BLOCKS = 2 + PROMPT
"""Number of KV blocks that suffice for the check with any block size, block 0 included."""
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Maximum difference of two logits, as a share of the largest logit times the square root of the number of layers, by
dtype.

Each layer rounds sums in another order, and such errors add up as the steps of a random walk. A 7B model with random
weights differs by half of this. A layer with a wrong position, head or weight differs by about the largest logit over
the square root of the layers.
"""


def check_runner(reference: TransformersRunner, runner: CudaModel) -> str | None:
    """Compares the logits of both runners, for a prompt and a decode step.

    Returns None if they agree. Otherwise returns the difference, or the reason why a kernel can't be compiled for this
    GPU. Raises RuntimeError for other failures, after which no runner could compute.
    """
    try:
        return _difference(reference, runner)
    except Exception as error:  # Triton's errors share no base class that exists without Triton
        if not _is_compile_error(error):
            raise
        return f"a kernel can't be compiled for this GPU: {type(error).__name__}: {error}"


def _is_compile_error(error: Exception) -> bool:
    return type(error).__module__.startswith("triton.") or "PassManager::run failed" in str(error)


def _difference(reference: TransformersRunner, runner: CudaModel) -> str | None:
    prompt = _length(runner.block_tokens, runner.num_blocks)
    for begin, end in ((0, prompt), (prompt, prompt + 1)):
        expected, actual = (
            _logits(reference, step(begin, end, reference.block_tokens, reference.device)),
            _logits(runner, step(begin, end, runner.block_tokens, torch.device("cpu"))),
        )
        problem = compare(expected, actual, runner.num_layers)
        if problem is not None:
            return f"{'a decode step' if begin else f'a prompt of {prompt} tokens'}: {problem}"
    return None


def check_captured(runner: CudaModel, bucket: Bucket, logits: torch.Tensor) -> str | None:
    """Compares a decode step after a prompt, captured and not captured. Returns the difference; None if they agree.
    `logits`: the tensor to which buckets write theirs."""
    prompt = _length(runner.block_tokens, runner.num_blocks)
    batch = step(prompt, prompt + 1, runner.block_tokens, torch.device("cpu"))
    _logits(runner, step(0, prompt, runner.block_tokens, torch.device("cpu")))
    expected = _logits(runner, batch)
    bucket.compute(batch, None)
    return compare(expected, logits[:1].clone(), runner.num_layers)


def check_prompts(runner: CudaModel, buckets: Sequence[PromptBucket]) -> str | None:
    """Compares a prompt computed in each bucket with one computed without buckets. Returns the difference; None if they
    agree."""
    prompt = _length(runner.block_tokens, runner.num_blocks)
    batch = step(0, prompt, runner.block_tokens, torch.device("cpu"))
    expected = _logits(runner, batch)
    for bucket in buckets:
        problem = _compare_prompt(runner, PromptPass(runner, bucket, batch, None, None), expected)
        if problem is not None:
            return f"a prompt in a bucket of {bucket.tokens} tokens and {bucket.rows} rows: {problem}"
    return None


def check_handoffs(runner: CudaModel, buckets: Sequence[PromptBucket]) -> str | None:
    """Compares a prompt computed without buckets with one computed in the pieces between handoffs, for each bucket.
    Returns the difference; None if they agree."""
    prompt = _length(runner.block_tokens, runner.num_blocks)
    batch = step(0, prompt, runner.block_tokens, torch.device("cpu"))
    expected = _logits(runner, batch)
    for bucket in buckets:
        for groups in HANDOFF_GROUPS:
            run = HandoffPass(runner, bucket, batch, None, NoHandoffs(groups))
            problem = _compare_prompt(runner, run, expected)
            if problem is not None:
                return f"a prompt in a bucket of {bucket.tokens} tokens, cut at {', '.join(groups)}: {problem}"
    return None


def _compare_prompt(runner: CudaModel, run: PromptPass, expected: torch.Tensor) -> str | None:
    run.advance(runner.num_layers)
    problem = compare(expected, run.logits(), runner.num_layers)
    run.abort()
    return problem


def compare(expected: torch.Tensor, actual: torch.Tensor, layers: int) -> str | None:
    """Returns the difference between two runners' logits [Q, V] if it is too large for this many layers, else None."""
    largest, apart = float(expected.float().abs().max()), float((expected.float() - actual.float()).abs().max())
    if apart <= TOLERANCE[expected.dtype] * math.sqrt(layers) * largest:
        return None
    return f"logits of up to {largest:.4g} lie {apart:.4g} apart"


def step(begin: int, end: int, block_tokens: int, device: torch.device) -> StepBatch:
    """Returns a batch of one greedy row whose tokens [begin, end) are computed; a single one is a decode row."""
    tokens, blocks = list(range(1, end + 1)), list(range(1, -(-end // block_tokens) + 1))
    request = Request("check", "", tokens, 1, Sampling(temperature=0.0), 0.0, None, ignore_eos=True, blocks=blocks)
    request.computed = begin
    return build_step([Row(request, end - begin)], int(begin > 0), block_tokens, device)


def _length(block_tokens: int, num_blocks: int) -> int:
    """Returns the number of tokens of the prompt. They must fit into the cache together with one more."""
    return max(1, min(PROMPT, (num_blocks - 1) * block_tokens - 1))


def _logits(runner: TransformersRunner | CudaModel, batch: StepBatch) -> torch.Tensor:
    run = runner.start(batch, None) if isinstance(runner, TransformersRunner) else LayeredPass(runner, batch, None)
    run.advance(runner.num_layers)
    return run.logits()
