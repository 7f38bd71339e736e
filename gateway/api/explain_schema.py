"""Messages of GET /explain/{id}."""

from __future__ import annotations

import msgspec

from gateway.calls.explanations import Explained
from gateway.scheduling.decision import Decision


class ExplainReply(msgspec.Struct, frozen=True):
    """How the generations of one call were placed."""

    id: str
    """The call's, as its reply names it."""
    request_id: str
    tenant: str
    function: str
    placements: list[ExplainedPlacement]
    """In their order: one per choice of the call, one more for each that was placed again after a node had failed."""
    left_out: int
    """So many more were not kept."""


class ExplainedPlacement(msgspec.Struct, frozen=True):
    request: str
    """The generation's id."""
    decision: Decision


def reply_of(found: Explained) -> ExplainReply:
    return ExplainReply(
        id=found.call.id,
        request_id=found.call.request_id,
        tenant=found.call.tenant,
        function=found.call.function,
        placements=[ExplainedPlacement(kept.request.id, kept.decision()) for kept in found.placements],
        left_out=found.left_out,
    )
