"""Converts the engine's events of one request into those for the gateway."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from cluster.messages import (
    Done,
    Event,
    Failed,
    GenerateRequest,
    PromptLogprobs,
    Started,
    Timing,
    Token,
    TokenLogprob,
    TopLogprob,
)
from node_agent.api.detokenize import IncrementalDetokenizer, TokenText
from node_agent.api.stops import StopMatcher
from node_agent.ipc import Admitted, Finished, Generated, PromptScored, Top

RETRYABLE = frozenset({"unavailable", "overloaded", "node_failed", "internal"})
"""Error types of failures that may be absent on another node, so that a retry is useful."""
RETRY_AFTER = 1.0
"""Seconds after which callers may retry when this node is full or unavailable."""

RequestEvent = Admitted | PromptScored | Generated | Finished


class Reply:
    """Reply to one request: detokenises, finds stop strings and counts tokens. When a stop string is complete,
    `stopped` becomes True; the caller must then cancel the request. Later tokens are dropped."""

    def __init__(self, request: GenerateRequest, node_id: str, tokens: TokenText, received: float) -> None:
        """`received`: arrival time of the request, in monotonic seconds."""
        self._request = request
        self._node_id = node_id
        sampling = request.sampling
        self._tokens = tokens
        token_text = tokens if sampling.skip_special_tokens else tokens.with_special
        spaces = sampling.skip_special_tokens or sampling.spaces_between_special_tokens
        self._text = IncrementalDetokenizer(token_text, request.token_ids, spaces=spaces)
        hidden = token_text.silent_texts.values() if request.stop else ()
        self._matcher = StopMatcher(request.stop, include=sampling.include_stop, hidden=hidden)
        self._hidden = token_text.silent_texts if self._matcher.reads_hidden else {}
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._end_ids = self._stop_ids if request.ignore_eos else self._stop_ids | tokens.eos_ids
        self._received = received
        self.count = 0
        self._characters = 0
        """number of characters of the tokens' text so far, whether held back or not"""
        self._resumed = 0
        """number of tokens that another node has sent"""
        self.stopped = False
        self._stop_reason: int | str | None = None
        self.ended = False

    def resume(self, token_ids: Sequence[int]) -> None:
        """Processes, in order, the tokens that another node has already sent. The next events are those that the other
        node would have sent next. Must be called before `translate`."""
        for token_id in token_ids:
            if not self.stopped:
                self._token(Generated(self._request.id, token_id))
        self._resumed = self.count

    def translate(self, event: RequestEvent) -> Event | None:
        """Converts one event of the engine. Returns None when there is nothing to send. After Done or Failed, `ended`
        is True."""
        match event:
            case Admitted(state=state):
                return Started(node=self._node_id, cold_start=state)
            case PromptScored():
                return self._prompt_logprobs(event)
            case Generated():
                return None if self.stopped else self._token(event)
            case Finished():
                return self._finish(event)

    def fail(self, type: str, message: str, retry_after: float | None = None) -> Failed:
        """Returns the final event of a request that the engine did not end. It is retryable on another node if no token
        was computed here."""
        self.ended = True
        retryable = self.count == self._resumed and type in RETRYABLE
        return Failed(type=type, message=message, retryable=retryable, retry_after=retry_after)

    def _prompt_logprobs(self, event: PromptScored) -> PromptLogprobs:
        ids = self._request.token_ids[event.index :]
        scored = zip(ids, event.scores, strict=False)
        return PromptLogprobs(event.index, [self._logprob(token_id, top) for token_id, top in scored])

    def _token(self, event: Generated) -> Token:
        sampling = self._request.sampling
        ends = event.token_id in self._end_ids
        text = "" if ends and not sampling.include_stop else self._text.add(event.token_id)
        offset, self._characters = self._characters, self._characters + len(text)
        if event.token_id in self._stop_ids:  # the engine ends the request with this token
            self._stop_reason = event.token_id
        logprobs = [self._logprob(event.token_id, event.top, offset)] if event.top is not None else []
        hidden = "" if ends else self._hidden.get(event.token_id, "")
        text = self._match_stops(hidden, is_hidden=True) if hidden else self._match_stops(text)
        token = Token(text=text, token_ids=[event.token_id], index=self.count, logprobs=logprobs)
        self.count += 1
        return token

    def _match_stops(self, piece: str, *, is_hidden: bool = False) -> str:
        """Returns the text that is safe to emit after `piece`, the text of one more token. Stop strings are ignored
        within the first `min_tokens` tokens."""
        counts = self.count >= self._request.sampling.min_tokens
        text, stop = self._matcher.feed(piece, counts=counts, is_hidden=is_hidden)
        if stop is not None:
            self.stopped, self._stop_reason = True, stop
        return text

    def _logprob(self, token_id: int, top: Top, offset: int = 0) -> TokenLogprob:
        token, tops = self._tokens.one(token_id), [(i, self._tokens.one(i), value) for i, value in top.top]
        return TokenLogprob(
            token=token,
            token_id=token_id,
            logprob=top.logprob,
            top=[TopLogprob(text, i, value, self._tokens.part(i, text)) for i, text, value in tops],
            rank=top.rank,
            offset=offset,
            part=self._tokens.part(token_id, token),
        )

    def _finish(self, event: Finished) -> Event:
        if event.reason == "error" and not self.stopped:
            later = RETRY_AFTER if event.error_type == "overloaded" else None
            failed = self.fail(event.error_type or "internal", event.error or "the engine failed", later)
            adapter = self._request.adapter
            return msgspec.structs.replace(failed, damaged=adapter.digest) if adapter and event.damaged else failed
        text = ""
        if not self.stopped:
            text = self._match_stops(self._text.flush())
            if not self.stopped:
                text += self._matcher.flush()
        self.ended = True
        return Done(
            finish_reason="stop" if self.stopped else event.reason,
            prompt_tokens=len(self._request.token_ids),
            completion_tokens=self.count,
            cached_tokens=event.cached_tokens,
            timing=Timing(
                queue=event.queue,
                prefill=event.prefill,
                total=time.monotonic() - self._received,
                cold_start=event.cold_start,
                preemptions=event.preemptions,
                device=event.device,
            ),
            text=text,
            stop_reason=self._stop_reason,
        )
