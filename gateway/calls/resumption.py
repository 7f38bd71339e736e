"""A request that goes on on another node, after the one that had sent some of its tokens failed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.messages import GenerateRequest
from gateway.calls.node_watch import NodeFailure

MOST_RESUMPTIONS = 2
"""Of one request. A request that ends its nodes must not go through all of them."""
FAILED_NODE = ("node_failed", "unavailable")
"""Errors of a node that say nothing against the request."""


def may_resume(failure: NodeFailure, resumed: int) -> bool:
    """Whether a request that has tokens may go on elsewhere; `resumed`: how often it did."""
    return resumed < MOST_RESUMPTIONS and (failure.retryable or failure.error.type in FAILED_NODE)


def resumption_of(request: GenerateRequest, generated: Sequence[int]) -> GenerateRequest:
    """The request for a node that goes on behind the tokens `generated`. Seed, adapter and limits stay; what was
    promised for the first token, and what was to be told of the prompt, is over."""
    return msgspec.structs.replace(
        request,
        generated=list(generated),
        sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=None),
        ttft=None,
    )
