"""The check at start: how far two results are apart, and its requests to an engine that keeps or mixes rows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node_agent.vllm.self_check import BESIDE_TOKENS, NEW_TOKENS, UNLIKE, RowsMixed, Scores, check_rows, difference

FIRST: Scores = [(5, {5: -0.1, 6: -2.0}), (7, {7: -0.5, 8: -0.6})]


def test_the_largest_shift_counts() -> None:
    assert difference(FIRST, FIRST) == 0
    assert difference(FIRST, [(5, {5: -0.1, 6: -2.0}), (7, {7: -0.5, 8: -0.9})]) == pytest.approx(0.3)


def test_tokens_after_a_tie_do_not_count() -> None:
    tied: Scores = [(5, {5: -0.1, 6: -2.0}), (8, {7: -0.56, 8: -0.55}), (9, {9: 0.0})]
    assert difference([*FIRST, (4, {4: 0.0})], tied) == pytest.approx(0.06)


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_what_is_no_number_is_unlike(score: float) -> None:
    assert difference(FIRST, [(5, {5: score, 6: -2.0})]) == UNLIKE


def test_tokens_that_were_unlikely_are_unlike() -> None:
    assert difference(FIRST, [(9, {9: -0.1, 5: -2.0})]) == UNLIKE


class Types:
    """Plain values in the place of vLLM's types."""

    def parameters(self, arguments: dict[str, Any], bad_words: object) -> dict[str, Any]:
        return arguments

    def adapter(self, digest: str, number: int, folder: Path) -> int:
        return number

    def prompt(self, token_ids: object, salt: str) -> str:
        return salt


class Engine:
    """An engine of two slots whose rows of the base model have the base's scores, unless `mixes` is True and an adapter
    runs beside them."""

    def __init__(self, mixes: bool = False, ignores_adapters: bool = False) -> None:
        self._mixes, self._ignores = mixes, ignores_adapters
        self.running: set[int] = set()
        self.generated: dict[str, int] = {}
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return [2]

    async def generate(
        self, prompt: str, sampling_params: dict[str, Any], request_id: str, *, lora_request: int | None = None
    ) -> AsyncIterator[Any]:
        if lora_request is not None:
            self.running.add(lora_request)
        try:
            for _ in range(sampling_params["max_tokens"]):
                await asyncio.sleep(0)
                adapted = (
                    lora_request if lora_request is not None or not self._mixes else next(iter(self.running), None)
                )
                token = 7 if adapted is None or self._ignores else adapted
                self.generated[request_id] = self.generated.get(request_id, 0) + 1
                tops = {token: SimpleNamespace(logprob=-0.1)}
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token], logprobs=[tops])])
        finally:
            self.running.discard(lora_request or 0)

    async def remove_lora(self, lora_id: int) -> bool:
        assert not self.running, "an adapter is removed after the requests that use it"
        self.calls.append(f"remove {lora_id}")
        return True

    async def abort(self, request_id: str) -> None: ...

    async def add_lora(self, lora_request: Any) -> bool:
        return True

    def shutdown(self) -> None: ...


def run_check(engine: Engine) -> None:
    asyncio.run(asyncio.wait_for(check_rows(engine, Types(), 100, 0.3), 60))


def test_requests_with_adapters_end_once_the_base_model_has_been_compared() -> None:
    engine = Engine()
    run_check(engine)
    assert engine.generated["garnish-check-beside"] == NEW_TOKENS
    beside = [count for name, count in engine.generated.items() if name.startswith("garnish-check-beside-")]
    assert len(beside) == 2 and all(1 <= count < BESIDE_TOKENS for count in beside)
    assert not engine.running and len(engine.calls) == 2, "both adapters are removed"


def test_an_engine_that_mixes_rows_is_refused() -> None:
    with pytest.raises(RowsMixed, match="other tokens next to adapters than alone"):
        run_check(Engine(mixes=True))


def test_an_engine_that_ignores_adapters_is_refused() -> None:
    with pytest.raises(RowsMixed, match="the base model's tokens for requests with an adapter"):
        run_check(Engine(ignores_adapters=True))
