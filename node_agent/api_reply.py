"""One request's reply: what the engine says about it, turned into the events that the gateway reads."""

from __future__ import annotations

import time

from cluster.messages import Done, Event, Failed, GenerateRequest, Started, Timing, Token, TokenLogprob, TopLogprob
from node_agent.detokenize import IncrementalDetokenizer, TokenText
from node_agent.ipc import Admitted, Finished, Generated, Top
from node_agent.stops import StopMatcher

RETRYABLE = frozenset({"unavailable", "overloaded", "node_failed", "internal"})
"""Failures that another node may not have."""
RETRY_AFTER = 1.0
"""Seconds that callers are asked to wait when this node is full or away."""

RequestEvent = Admitted | Generated | Finished


class Reply:
    """Detokenises, looks for stop strings and counts. `stopped` becomes true when a stop string is complete: the
    engine must then be told to cancel, and what it still generates is dropped."""

    def __init__(self, request: GenerateRequest, node_id: str, tokens: TokenText, received: float) -> None:
        """`received` is when the request came, in monotonic seconds."""
        self._request = request
        self._node_id = node_id
        self._tokens = tokens
        self._text = IncrementalDetokenizer(tokens, request.token_ids)
        self._matcher = StopMatcher(request.stop)
        self._received = received
        self.count = 0
        self.stopped = False
        self.ended = False

    def translate(self, event: RequestEvent) -> Event | None:
        """The gateway's event for one of the engine's, or None. After Done or Failed, `ended` is true."""
        match event:
            case Admitted(state=state):
                return Started(node=self._node_id, cold_start=state)
            case Generated():
                return None if self.stopped else self._token(event)
            case Finished():
                return self._finish(event)

    def fail(self, type: str, message: str, retry_after: float | None = None) -> Failed:
        """The end of a request that the engine did not end; another node may try when no token was computed."""
        self.ended = True
        return Failed(
            type=type, message=message, retryable=self.count == 0 and type in RETRYABLE, retry_after=retry_after
        )

    def _token(self, event: Generated) -> Token:
        text, self.stopped = self._matcher.feed(self._text.add(event.token_id))
        logprobs = [self._logprob(event.token_id, event.top)] if event.top is not None else []
        token = Token(text=text, token_ids=[event.token_id], index=self.count, logprobs=logprobs)
        self.count += 1
        return token

    def _logprob(self, token_id: int, top: Top) -> TokenLogprob:
        return TokenLogprob(
            token=self._tokens.one(token_id),
            token_id=token_id,
            logprob=top.logprob,
            top=[TopLogprob(token=self._tokens.one(i), token_id=i, logprob=value) for i, value in top.top],
        )

    def _finish(self, event: Finished) -> Event:
        if event.reason == "error" and not self.stopped:
            later = RETRY_AFTER if event.error_type == "overloaded" else None
            return self.fail(event.error_type or "internal", event.error or "the engine failed", later)
        text = ""
        if not self.stopped:
            text, self.stopped = self._matcher.feed(self._text.flush())
            if not self.stopped:
                text += self._matcher.flush()
        self.ended = True
        return Done(
            finish_reason="stop" if self.stopped else event.reason,
            prompt_tokens=len(self._request.token_ids),
            completion_tokens=self.count,
            cached_tokens=0,
            timing=Timing(
                queue=event.queue,
                prefill=event.prefill,
                total=time.monotonic() - self._received,
                cold_start=event.cold_start,
                preemptions=event.preemptions,
            ),
            text=text,
        )
