"""Sampling parameters of a call in vLLM's form, and vLLM's log probabilities in the node's form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from cluster.messages import Grammar
from node_agent.engine.request import Request
from node_agent.ipc import Top

SEED_BITS = 63


def vllm_parameters(request: Request, eos_ids: Collection[int]) -> dict[str, Any]:
    """Returns the arguments of vLLM's `SamplingParams` for the rest of a request.

    Tokens that the request already has, from an earlier node or before a preemption, are part of the prompt for vLLM.
    Presence and frequency penalties therefore count only tokens that vLLM itself generates.
    """
    sampling, generated = request.sampling, request.generated
    # the end token ends every form, also for a caller who ignores it
    ends = [] if request.ignore_eos and sampling.grammar is None else sorted(eos_ids)
    return {
        "max_tokens": request.max_tokens - generated,
        "min_tokens": max(0, sampling.min_tokens - generated),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed_of(sampling.seed, sampling.choice, generated),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": sampling.logit_bias or None,
        "allowed_token_ids": sampling.allowed_token_ids or None,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": None if generated else sampling.prompt_logprobs,
        "stop_token_ids": [*ends, *sampling.stop_token_ids],
        "ignore_eos": request.ignore_eos,
        "detokenize": False,
        "structured_outputs": None if sampling.grammar is None else structured_outputs(sampling.grammar),
    }


def structured_outputs(grammar: Grammar) -> dict[str, Any]:
    """Returns the arguments of vLLM's `StructuredOutputsParams`."""
    match grammar.kind:
        case "choice":
            return {"choice": json.loads(grammar.text)}
        case "lark":
            return {"grammar": grammar.text}
        case _:
            return {grammar.kind: grammar.text}


def seed_of(seed: int, choice: int, position: int) -> int:
    """Returns a seed of 63 bits that depends on the arguments alone. `position`: number of tokens that the request
    already has."""
    digest = hashlib.sha256(f"{seed} {choice} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)


def top_of(token_id: int, logprobs: Mapping[int, Any], count: int) -> Top:
    """Returns the log probability of a token and of the `count` likeliest ones. `logprobs`: vLLM's entries (with
    `logprob` and `rank`) by token id, which include `token_id`."""
    chosen = logprobs[token_id]
    likeliest = sorted(logprobs.items(), key=lambda item: item[1].rank)[:count]
    return Top(chosen.logprob, [(each, entry.logprob) for each, entry in likeliest], chosen.rank or 0)
