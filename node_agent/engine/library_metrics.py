"""Answer to the question for the metrics of the library that computes a node's tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable

from node_agent.ipc import Answer

MAX_BYTES = 4 << 20
"""Maximum bytes of metrics that are passed on. vLLM's have some 50 KiB."""

log = logging.getLogger("garnish.engine")


def metrics_answer(question: str, read: Callable[[], bytes | None]) -> Answer:
    """Returns the answer to the question of this id. `read` returns Prometheus text; None if the engine computes by
    itself. The answer is an error if `read` raises, or returns more than MAX_BYTES."""
    try:
        metrics = read()
    except Exception as error:  # of the library's own collectors: it costs an answer, not the engine
        log.exception("the metrics can't be read")
        return Answer(question, error_type="internal", error=f"the metrics can't be read: {type(error).__name__}")
    if metrics is None:
        text = "this node's engine is `garnish`, whose metrics are all in the gateway's GET /metrics"
        return Answer(question, error_type="not_found", error=text)
    if len(metrics) > MAX_BYTES:
        text = f"the metrics have {len(metrics)} bytes; at most {MAX_BYTES} are passed on"
        return Answer(question, error_type="internal", error=text)
    return Answer(question, metrics=metrics.decode(errors="replace"))
