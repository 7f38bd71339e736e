"""Intake: conversion of a GenerateRequest, and the check whether it can be served here."""

from __future__ import annotations

import time

from cluster.messages import GenerateRequest
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.limits import Limits
from node_agent.engine.request import Request


def request_of(message: GenerateRequest) -> Request:
    """Returns the engine's request for a gateway's message."""
    return Request(
        id=message.id,
        tenant=message.tenant,
        tokens=[*message.token_ids, *message.generated],
        prompt_len=len(message.token_ids),
        max_tokens=message.max_tokens,
        sampling=message.sampling,
        deadline=time.monotonic() + message.timeout,
        adapter=message.adapter,
        ignore_eos=message.ignore_eos,
        function=message.function,
        weight=message.weight,
        slo_class=message.slo_class,
        reserved=message.reserved,
        ttft=message.ttft,
        tpot=message.tpot,
    )


def problem_of(request: Request, limits: Limits, blocks: BlockPool) -> tuple[str, str] | None:
    """Returns the error type and message of a request that can't run here; None if it could run alone."""
    tokens = request.prompt_len + request.max_tokens
    if not request.tokens or request.max_tokens < 1:
        return "validation_failed", "a request needs at least one prompt token and max_tokens of at least 1"
    if tokens > limits.max_context:
        return (
            "validation_failed",
            f"{request.prompt_len} prompt tokens and {request.max_tokens} more exceed the context of "
            f"{limits.max_context}",
        )
    if min(request.tokens) < 0 or max(request.tokens) >= limits.vocab_size:
        return "validation_failed", f"a token id is outside the vocabulary of {limits.vocab_size}"
    if blocks.blocks_for(tokens) > blocks.total:
        return (
            "too_large",
            f"{tokens} tokens need {blocks.blocks_for(tokens)} KV blocks; this node has {blocks.total}",
        )
    return None
