"""Questions from the API process to its engine, apart from requests. Each is answered once or times out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.errors import ServiceError
from node_agent.ipc import Answer, Question

MAX_OPEN = 64


class Questions:
    """Questions that wait for their answers."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[Answer]] = {}

    async def ask(self, send: Callable[[Question], None], question: Question, seconds: float) -> Answer | None:
        """Sends a question and returns the engine's answer; None if it does not answer within `seconds`.

        Raises ServiceError: `overloaded` when MAX_OPEN questions are open, `node_failed` when the engine exits first,
        or the error in the answer. Also raises errors of `send`.
        """
        if len(self._open) >= MAX_OPEN:
            raise ServiceError(
                "overloaded", f"{MAX_OPEN} questions already wait for this node's engine", retry_after=1.0
            )
        answering = self._open[question.id] = asyncio.get_running_loop().create_future()
        try:
            send(question)
            done, _ = await asyncio.wait({answering}, timeout=seconds)
        finally:
            del self._open[question.id]
        if not done:
            return None
        answer: Answer = answering.result()
        if answer.error_type:
            raise ServiceError(answer.error_type, answer.error)
        return answer

    def answered(self, answer: Answer) -> None:
        waiting = self._open.get(answer.id)
        if waiting is not None and not waiting.done():  # otherwise it timed out
            waiting.set_result(answer)

    def engine_gone(self) -> None:
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(ServiceError("node_failed", "the node's engine ended before it answered"))
