"""Log line for each successful call, from which `garnish logs --trace` builds a trace."""

from __future__ import annotations

import logging
import time

import msgspec

from cluster.messages import Done, GenerateRequest

CALL = "call ended"
"""Text by which the log line of a call is recognized."""

log = logging.getLogger("gateway.calls")


class Call(msgspec.Struct, frozen=True):
    at: float
    tenant: str
    digest: str
    rank: int
    bytes: int
    prompt_tokens: int
    output_tokens: int


def log_call(request: GenerateRequest, done: Done, received: float) -> None:
    """Logs a completed call, without its prompt and answer. `received`: monotonic seconds."""
    adapter = request.adapter
    call = Call(
        at=round(time.time() - (time.monotonic() - received), 4),
        tenant=request.tenant,
        digest=adapter.digest if adapter else "",
        rank=adapter.max_rank if adapter else 0,
        bytes=adapter.bytes if adapter else 0,
        prompt_tokens=done.prompt_tokens,
        output_tokens=done.completion_tokens,
    )
    if call.output_tokens:
        log.info(CALL, extra={"invocation": request.id, "call": msgspec.to_builtins(call)})
