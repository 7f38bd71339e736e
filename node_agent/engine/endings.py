"""The last message about a request: how it ended, and what of its time went where."""

from __future__ import annotations

import time

from cluster.messages import ColdStart
from node_agent.engine.request import Request
from node_agent.ipc import Finished


def expired(request: Request) -> tuple[str, str, str]:
    """Returns how a request ends whose deadline has passed: the reason, an error's type and its text."""
    if request.generated:
        return "timeout", "", ""
    if request.admitted:
        return "error", "timeout", "no token was ready before the deadline"
    return "error", "unavailable", "the deadline passed while the request was queued"


def finished(request: Request, reason: str, error_type: str, error: str, *, damaged: bool = False) -> Finished:
    now = time.monotonic()
    held = request.held if request.admitted else 0.0
    return Finished(
        id=request.id,
        reason=reason,
        queue=(request.admitted or now) - request.arrived - held,
        prefill=(request.first_token or now) - request.admitted + held if request.admitted else 0.0,
        cold_start=_cold_start(request, now),
        error_type=error_type,
        error=error,
        damaged=damaged,
        preemptions=request.preemptions,
        device=request.device_seconds,
    )


def _cold_start(request: Request, now: float) -> ColdStart:
    cold = request.cold
    if cold is None:
        return ColdStart(request.found, "none", 0.0, 0.0)
    exposed = cold.exposed
    if not cold.load:  # it ended before its adapter came, and waited until now if it had not begun, or could not go on
        since = cold.waits_since if cold.opened else cold.begun
        exposed += now - since if since else 0.0
    return ColdStart(
        request.found,
        cold.plan,
        cold.load,
        exposed,
        fetch=cold.fetch,
        layers_cpu=cold.layers_cpu,
        layers_device=cold.layers_device,
        replays=cold.replays,
        forecast=cold.forecast,
    )


def end_of(request: Request, eos_ids: frozenset[int]) -> str | None:
    """Returns why its last token is its last one, stop or length; None if it goes on."""
    token = request.tokens[-1]
    if token in request.sampling.stop_token_ids or (token in eos_ids and not request.ignore_eos):
        return "stop"
    return "length" if request.generated >= request.max_tokens else None
