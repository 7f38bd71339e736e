"""The thread with vLLM's engine: the order of what it tells vLLM, and how it ends. The engine is played; tests/vllm
has the real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from node_agent.vllm.driver import (
    AdapterLoaded,
    AsyncEngine,
    Driver,
    EngineDied,
    NewTokens,
    Output,
    RequestFailed,
    WorkerReports,
)
from node_agent.vllm.worker_extension import ADAPTERS_METHOD

SECONDS = 30.0


class EngineDeadError(Exception):
    """As vLLM's, which is told by its name."""


class PlayedEngine:
    """Notes what it is told, in order. Requests give the tokens that `give` puts."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.failures: dict[tuple[str, Any], Exception] = {}
        """what calls raise"""
        self.entering = asyncio.Event()
        """a request reaches the engine once this is set"""
        self.entering.set()
        self.seen = threading.Event()
        """a request has been made"""
        self.tokens: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        self.vllm_config = None

    def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        if (what, value) in self.failures:
            raise self.failures[what, value]

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        self.seen.set()
        try:
            await self.entering.wait()
        finally:
            self._tell("enter", request_id)
        try:
            finished = False
            while not finished:
                token, finished = await self.tokens.get()
                only = SimpleNamespace(token_ids=[token], logprobs=None)
                yield SimpleNamespace(outputs=[only], prompt_logprobs=None, num_cached_tokens=None, finished=finished)
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort(request_id)
            raise

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)
        self._tell("abort", request_id)

    async def add_lora(self, lora_request: Any) -> bool:
        await asyncio.sleep(0)
        self._tell("add", lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        await asyncio.sleep(0)
        self._tell("remove", lora_id)
        return True

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any:
        self._tell("rpc", method)
        return [{"slots": [1], "host": [1]}]

    def shutdown(self) -> None:
        self.told.append(("shutdown", None))


class World:
    def __init__(self) -> None:
        self.engine = PlayedEngine()
        self._changed = threading.Event()
        self.outputs: list[Output] = []
        self.driver = Driver(lambda: self.engine, self._changed.set)
        self.driver.wait(SECONDS)

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(int(SECONDS / 0.02)):
            self.outputs += self.driver.take()
            if condition():
                return
            self._changed.wait(0.02)
            self._changed.clear()
        raise TimeoutError(self.outputs, self.engine.told)

    def in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        self.driver._call(function, *arguments)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with closing(made.driver):
        yield made
    assert made.engine.told[-1] == ("shutdown", None)


def test_tokens_come_in_order(world: World) -> None:
    world.driver.generate("a", [1], None, None)
    for token in (5, 6, 7):
        world.in_thread(world.engine.tokens.put_nowait, (token, token == 7))
    world.until(lambda: len(world.outputs) == 3)
    assert world.outputs == [NewTokens("a", [token], None, None, 0, token == 7) for token in (5, 6, 7)]
    assert world.driver.abort("a").query() or world.until(world.driver.abort("a").query) is None
    assert ("abort", "a") not in world.engine.told, "it had ended"


def test_an_adapter_goes_after_the_requests_that_use_it(world: World) -> None:
    """Even if vLLM was only about to take a request: a request after the removal would load the adapter again."""
    world.in_thread(world.engine.entering.clear)
    world.driver.generate("a", [1], None, "adapter")
    assert world.engine.seen.wait(SECONDS)
    sent = world.driver.abort("a")
    world.until(sent.query)
    world.driver.remove_adapter(3)
    world.until(lambda: ("remove", 3) in world.engine.told)
    assert world.engine.told == [("enter", "a"), ("abort", "a"), ("remove", 3)]
    assert not world.outputs


def test_loads_and_removals_keep_their_order(world: World) -> None:
    for number in range(3):
        world.driver.add_adapter(number, number)
        world.driver.remove_adapter(number)
    world.driver.request_reports()
    world.until(lambda: len(world.outputs) == 4)
    assert world.engine.told == [
        *((what, number) for number in range(3) for what in ("add", "remove")),
        ("rpc", ADAPTERS_METHOD),
    ]
    assert world.outputs == [*(AdapterLoaded(n) for n in range(3)), WorkerReports([{"slots": [1], "host": [1]}])]


def test_a_load_that_fails_leaves_nothing_in_vllm(world: World) -> None:
    world.engine.failures["add", 4] = ValueError("it has a bias")
    world.driver.add_adapter(4, 4)
    world.until(lambda: world.outputs)
    assert world.outputs == [AdapterLoaded(4, "it has a bias")]
    assert world.engine.told == [("add", 4), ("remove", 4)]


@pytest.mark.parametrize("call", [("add", 1), ("remove", 1), ("rpc", ADAPTERS_METHOD), ("enter", "a"), ("abort", "a")])
def test_a_dead_engine_is_told(world: World, call: tuple[str, Any]) -> None:
    world.engine.failures[call] = EngineDeadError("gone")
    world.driver.generate("a", [1], None, None)
    world.until(lambda: ("enter", "a") in world.engine.told)
    world.driver.add_adapter(1, 1)
    world.driver.remove_adapter(1)
    world.driver.request_reports()
    world.driver.abort("a")
    world.until(lambda: EngineDied("gone") in world.outputs)


def test_a_refused_request_ends_alone(world: World) -> None:
    world.engine.failures["enter", "a"] = ValueError("too long")
    for name in ("a", "b"):
        world.driver.generate(name, [1], None, None)
    world.in_thread(world.engine.tokens.put_nowait, (5, True))
    world.until(lambda: len(world.outputs) == 2)
    assert set(map(type, world.outputs)) == {RequestFailed, NewTokens}


def test_a_start_that_fails_is_raised() -> None:
    def make() -> AsyncEngine:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        Driver(make, lambda: None).wait(SECONDS)


def test_an_engine_that_fails_its_check_is_ended() -> None:
    engine = PlayedEngine()

    async def check(found: AsyncEngine) -> None:
        assert found is engine
        raise ValueError("rows mix")

    with pytest.raises(ValueError, match="rows mix"):
        Driver(lambda: engine, lambda: None, check).wait(SECONDS)
    assert engine.told == [("shutdown", None)]
