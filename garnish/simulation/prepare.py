"""From a trace's requests to jobs for a kind of node."""

from __future__ import annotations

from collections.abc import Sequence

from garnish.simulation.job import Job, TraceRequest
from garnish.simulation.profile import NodeProfile
from garnish.simulation.slo import Slo

STATED_TOKENS = 256
"""`max_tokens` of a call that states none (docs/guide/invoke.md). Who got a longer answer is taken to have asked for
it."""


def make_jobs(requests: Sequence[TraceRequest], profile: NodeProfile, slo: Slo) -> list[Job]:
    """Returns the requests as jobs for nodes of `profile`, numbered in order, as the simulator wants them."""
    return [
        Job(
            number=number,
            at=request.at,
            digest=request.function or None,
            rank=request.rank if request.function else 0,
            bytes=(request.bytes or request.rank * profile.bytes_per_rank) if request.function else 0,
            prompt=request.prompt_tokens,
            output=request.output_tokens,
            max_tokens=_stated(request, profile),
            tenant=request.tenant,
            function=request.function,
            ttft_slo=slo.ttft,
            tpot_slo=slo.per_token,
        )
        for number, request in enumerate(requests)
    ]


def _stated(request: TraceRequest, profile: NodeProfile) -> int:
    left = profile.max_context - request.prompt_tokens
    return max(request.output_tokens, min(STATED_TOKENS, left))
