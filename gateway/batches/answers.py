"""What becomes of one call of a batch."""

from __future__ import annotations

from typing import NamedTuple

from gateway.batches.replies import LineReply

AGAIN = frozenset({"rate_limited", "overloaded", "unavailable"})
"""Errors after which a call is put back: it has not run, and may later."""
FLEETING = frozenset({"node_failed", "timeout", "internal"})
"""Errors after which it is tried again a few times."""


class Answer(NamedTuple):
    """`error`: the type of the error that the reply tells; None: it is a good one."""

    reply: LineReply
    error: str | None = None
    retry_after: float | None = None
