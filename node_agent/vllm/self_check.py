"""Check at start that vLLM keeps the rows of a batch apart: the base model must compute the same in a batch with
adapters as alone."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from node_agent.vllm.driver import CANCEL_S, AsyncEngine
from node_agent.vllm.engine import VllmTypes
from node_agent.vllm.worker_extension import FILL_METHOD, START_METHOD

FIRST_NUMBER = 1 << 30
"""Number of the first adapter of the check. Adapters of requests have smaller ones."""
PROMPT_TOKENS, NEW_TOKENS = 12, 6
BESIDE_TOKENS = 64
"""Maximum tokens of the adapters' requests, which are cancelled once the base model's request has ended."""
TOP = 5
UNLIKE = 1000.0
"""Difference of scores that have nothing in common."""
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Largest difference of a log probability that rounding causes, by data type."""

Score = tuple[int, Mapping[int, float]]
"""A generated token, and the log probabilities of the likeliest tokens at its place."""
Scores = Sequence[Score]

log = logging.getLogger("garnish.engine")


class RowsMixed(ValueError):
    """Raised when vLLM gives rows of a batch what belongs to other rows."""


async def check_rows(engine: AsyncEngine, types: VllmTypes, vocab_size: int, tolerance: float) -> None:
    """Prepares vLLM's workers, and compares the base model alone with the base model in a batch with two random
    adapters. Raises RowsMixed."""
    mended = await engine.collective_rpc(START_METHOD)
    check = _Check(engine, types, vocab_size)
    alone = await check.score("alone", None, NEW_TOKENS)
    slots = (await engine.collective_rpc(FILL_METHOD, args=(FIRST_NUMBER,)))[0]
    numbers = range(FIRST_NUMBER, FIRST_NUMBER + slots)
    mixed, adapter_scores = await check.score_beside({numbers[0], numbers[-1]})
    for number in numbers:
        await engine.remove_lora(number)
    shift = difference(alone, mixed)
    weakest = min(difference(alone, scores) for scores in adapter_scores)
    log.info(
        "checked that vLLM keeps rows apart",
        extra={"difference": shift, "tolerance": tolerance, "adapters": weakest, "mended": any(mended)},
    )
    if shift > tolerance:
        raise RowsMixed(
            "this vLLM gives the base model other tokens next to adapters than alone (its log probabilities differ by "
            f"{shift:.3g}, above {tolerance:g}): requests would get other requests' adapters; use another version of "
            "vLLM (docs/operate/engines.md)"
        )
    if weakest <= tolerance:
        raise RowsMixed(
            "this vLLM computes the base model's tokens for requests with an adapter; use another version of vLLM "
            "(docs/operate/engines.md)"
        )


class _Check:
    def __init__(self, engine: AsyncEngine, types: VllmTypes, vocab_size: int) -> None:
        self._engine, self._types = engine, types
        self._prompt = [(11 + 37 * at) % vocab_size for at in range(PROMPT_TOKENS)]

    async def score(self, name: str, number: int | None, tokens: int) -> Scores:
        """Returns the scores of one request."""
        return [score async for score in self._scores(name, number, tokens)]

    async def _scores(self, name: str, number: int | None, tokens: int) -> AsyncIterator[Score]:
        """Yields the scores of one request as they come."""
        parameters = {
            "max_tokens": tokens,
            "temperature": 0.0,
            "logprobs": TOP,
            "ignore_eos": True,
            "detokenize": False,
        }
        adapter = None if number is None else self._types.adapter(f"garnish-check-{number}", number, Path("/none"))
        prompt = self._types.prompt(self._prompt, f"garnish-check-{name}")
        async for output in self._engine.generate(
            prompt, self._types.parameters(parameters, ()), f"garnish-check-{name}", lora_request=adapter
        ):
            (only,) = output.outputs
            for token, tops in zip(only.token_ids, only.logprobs, strict=True):
                yield token, {each: entry.logprob for each, entry in tops.items()}

    async def score_beside(self, numbers: set[int]) -> tuple[Scores, list[Scores]]:
        """Returns the base model's scores while requests of these adapters run, and those requests' own up to then."""
        running = [_Running(self._scores(f"beside-{number}", number, BESIDE_TOKENS)) for number in numbers]
        try:
            for each in running:
                await each.wait_for_token()
            base = await self.score("beside", None, NEW_TOKENS)
            for each in running:
                each.check()
            return base, [each.scores for each in running]
        finally:
            for each in running:
                await each.cancel()


class _Running:
    """A request whose scores are collected while others run."""

    def __init__(self, source: AsyncIterator[Score]) -> None:
        self.scores: list[Score] = []
        self._source, self._began = source, asyncio.Event()
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for score in self._source:
            self.scores.append(score)
            self._began.set()

    async def wait_for_token(self) -> None:
        """Returns at the first token, or when the request has ended."""
        wait = asyncio.create_task(self._began.wait())
        await asyncio.wait([wait, self._task], return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()

    def check(self) -> None:
        """Raises what the request has failed with."""
        if self._task.done():
            self._task.result()

    async def cancel(self) -> None:
        """Ends the request, if vLLM answers within CANCEL_S seconds."""
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CANCEL_S)


def difference(first: Scores, second: Scores) -> float:
    """Returns the largest difference of a log probability, up to the first place with different tokens. Returns at most
    UNLIKE, which is also the result if the likeliest token of one is not among the likeliest of the other there."""
    largest = 0.0
    for (token, scores), (second_token, second_scores) in zip(first, second, strict=False):
        if token not in second_scores or second_token not in scores:
            return UNLIKE
        shifts = [abs(scores[each] - second_scores[each]) for each in scores.keys() & second_scores.keys()]
        if not all(map(math.isfinite, shifts)):
            return UNLIKE
        largest = max(largest, *shifts)
        if token != second_token:
            break
    return min(largest, UNLIKE)
