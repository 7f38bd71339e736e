"""Builds the tensors of a StepBatch and a LoraBatch from the rows chosen for an iteration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container

import numpy as np
import torch

from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.leases import Lease
from node_agent.runner.sampler import uniform
from node_agent.runner.score_rules import ScoreRules, changes_scores
from node_agent.types import LoraBatch, PromptScoring, SamplingBatch, StepBatch

UNKNOWN = 0
"""Token id that stands for a token that only the device knows yet."""


def build_step(rows: list[Row], n_decode: int, block_tokens: int, device: torch.device) -> StepBatch:
    """Returns the batch of `rows`, in order. The first `n_decode` are decode rows of one token each."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, logit_rows = [0], []
    for row in rows:
        request, begin, end = row.request, row.begin, row.begin + row.length
        token_ids += [UNKNOWN] if row.ahead else request.tokens[begin:end]
        positions += range(begin, end)
        slots += [request.blocks[p // block_tokens] * block_tokens + p % block_tokens for p in range(begin, end)]
        starts.append(starts[-1] + row.length)
        if row.wants_logits:
            logit_rows.append(starts[-1] - 1)
    contexts = [row.begin + row.length for row in rows]
    widest = max(-(-context // block_tokens) for context in contexts)
    table = np.zeros((len(rows), widest), dtype=np.int32)
    for row, blocks in zip(rows, table, strict=True):
        row_blocks = row.request.blocks[:widest]
        blocks[: len(row_blocks)] = row_blocks
    return StepBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.tensor(slots, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        sampling=_sampling([row for row in rows if row.wants_logits]),
        n_decode=n_decode,
        n_tokens=len(token_ids),
        n_rows=len(rows),
        max_query=max(row.length for row in rows),
        max_context=max(contexts),
        query_lens=[row.length for row in rows],
        context_lens=contexts,
        scoring=_scoring(rows, starts, device),
    )


def _scoring(rows: list[Row], starts: list[int], device: torch.device) -> PromptScoring | None:
    """Returns the prompt tokens to score, or None. `starts`: index of each row's first token in the pass."""
    before: list[int] = []
    targets: list[int] = []
    top: list[int] = []
    for row, start in zip(rows, starts, strict=False):
        request, scored = row.request, row.scored
        before += [start + place - 1 - request.computed for place in scored]
        targets += [request.tokens[place] for place in scored]
        top += [request.sampling.prompt_logprobs or 0] * len(scored)
    if not before:
        return None
    return PromptScoring(torch.tensor(before, device=device), torch.tensor(targets, device=device), top)


def _sampling(rows: list[Row]) -> SamplingBatch:
    requests = [row.request for row in rows]
    samplings = [request.sampling for request in requests]
    return SamplingBatch(
        temperature=[sampling.temperature for sampling in samplings],
        top_p=[sampling.top_p for sampling in samplings],
        top_k=[sampling.top_k for sampling in samplings],
        min_p=[sampling.min_p for sampling in samplings],
        uniform=[
            uniform(sampling.seed, sampling.choice, len(row.request.tokens) + row.ahead)
            for sampling, row in zip(samplings, rows, strict=True)
        ],
        logprobs=[-1 if sampling.logprobs is None else sampling.logprobs for sampling in samplings],
        rules={i: request.rules for i, request in enumerate(requests) if request.rules is not None},
        masks={i: mask for i, request in enumerate(requests) if (mask := _mask(request)) is not None},
    )


def _mask(request: Request) -> Callable[[], np.ndarray] | None:
    """Returns a function that returns the tokens that may come next, as bits; None if all may. No request has both a
    grammar and `allowed_token_ids`."""
    if request.grammar is not None:
        return request.grammar.mask
    allowed = request.allowed
    return None if allowed is None else lambda: allowed


def build_lora(rows: list[Row], device: torch.device, without: Container[str] = ()) -> LoraBatch:
    """Returns the LoRA batch of `rows`. Adjacent rows of one adapter form one segment, so order rows by adapter.
    Adapters with digests in `without` are treated as the base model."""
    bounds: list[tuple[int, int]] = []
    leases: list[Lease | None] = []
    at = 0
    for row in rows:
        lease = row.request.lease
        if lease is not None and lease.digest in without:
            lease = None
        slot = -1 if lease is None else lease.slot
        if bounds and slot == (-1 if leases[-1] is None else leases[-1].slot):
            bounds[-1] = (bounds[-1][0], at + row.length)
        else:
            bounds.append((at, at + row.length))
            leases.append(lease)
        at += row.length
    slots = [-1 if lease is None else lease.slot for lease in leases]
    of_tokens = [slot for slot, (begin, end) in zip(slots, bounds, strict=True) for _ in range(begin, end)]
    return LoraBatch(
        seg_start=torch.tensor([0, *(end for _, end in bounds)], dtype=torch.int32, device=device),
        seg_slot=torch.tensor(slots, dtype=torch.int32, device=device),
        token_slot=torch.tensor(of_tokens, dtype=torch.int32, device=device),
        leases=leases,
        bounds=bounds,
        max_rank=max((max(lease.ranks, default=0) for lease in leases if lease), default=0),
        empty=all(lease is None for lease in leases),
    )


def rules_of(request: Request, eos_ids: Collection[int], device: torch.device) -> ScoreRules | None:
    """Returns the rules by which the request's parameters change its logits, applied to its tokens so far. Returns None
    if they change nothing."""
    if not changes_scores(request.sampling):
        return None
    prompt, generated = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
    rules = ScoreRules(request.sampling, prompt, request.max_tokens, eos_ids, device)
    for token in generated:
        rules.append_token(token)
    return rules
