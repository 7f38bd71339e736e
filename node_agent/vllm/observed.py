"""Compares the node's performance model with vLLM's steps for callers, so that forecasts follow the host."""

from __future__ import annotations

from collections.abc import Mapping

from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.performance.drift import Drift
from node_agent.vllm.driver import NewTokens


class ObservedSteps:
    """Groups vLLM's tokens by step, and gives `Drift` the steps of decode rows alone, and of prompts alone."""

    def __init__(self, requests: Mapping[str, Request], chunk_tokens: int) -> None:
        """`requests`: those that vLLM computes, by their ids there. `chunk_tokens`: maximum prompt tokens of a step."""
        self._requests, self._chunk_tokens = requests, chunk_tokens
        self._end, self._ids, self._is_pure = 0.0, set[str](), False
        """end of the latest step, the requests that got a token in it, and whether each got just one and not its
        first"""
        self._before, self._ids_before = 0.0, set[str]()

    def take(self, drift: Drift | None, output: NewTokens) -> None:
        """Takes an output, before the engine does."""
        if output.times is None:
            return
        request, end = self._requests[output.id], output.times.ended
        if end > self._end:
            if drift is not None:
                self._observe(drift)
            self._before, self._ids_before = self._end, self._ids
            self._end, self._ids, self._is_pure = end, set(), True
        self._ids.add(output.id)
        self._is_pure &= bool(request.first_token) and len(output.token_ids) == 1
        is_alone = len(self._requests) == 1 and not request.first_token
        fits = len(request.tokens) <= self._chunk_tokens and not output.cached_tokens
        if drift is not None and is_alone and fits and output.times.scheduled >= self._before:
            drift.observe([Row(request, len(request.tokens))], 0, end - output.times.scheduled)

    def _observe(self, drift: Drift) -> None:
        """Gives the latest step to `Drift`, if all requests that vLLM computes decoded in it and in the step before."""
        requests = self._requests.values()
        decoded = self._is_pure and self._ids == self._ids_before == self._requests.keys()
        if decoded and all(request.first_token for request in requests):
            drift.observe([Row(request, 1) for request in requests], len(requests), self._end - self._before)
