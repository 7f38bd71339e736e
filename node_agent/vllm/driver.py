"""Runs vLLM's engine in a separate thread, and hands its outputs to the node's main loop.

vLLM's `AsyncLLM` lives on an event loop, which this thread runs. The main loop calls methods that return at once, and
takes what has happened since by `take`. Adapters are loaded and removed one at a time, in the order of the calls.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from node_agent.vllm.worker_extension import ADAPTERS_METHOD, WorkerAdapters

log = logging.getLogger("garnish.engine")

CANCEL_S = 2.0
"""Maximum seconds for running calls of vLLM to end once they are cancelled. A hung vLLM does not answer them."""
CLOSE_S = 15.0
"""Maximum seconds for vLLM's processes to end."""


class AsyncEngine(Protocol):
    """The part of vLLM's AsyncLLM that a node uses."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]: ...

    async def abort(self, request_id: str) -> None: ...

    async def add_lora(self, lora_request: Any) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class TokenTimes:
    """Times of vLLM's clock, in seconds: when it first computed on a request, and when the step of the latest
    token ended."""

    scheduled: float
    ended: float


@dataclass(frozen=True)
class NewTokens:
    """Tokens of a request, and what vLLM said of them. `finished` is True in its last output."""

    id: str
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None
    prompt_logprobs: Sequence[Mapping[int, Any] | None] | None
    cached_tokens: int
    finished: bool
    times: TokenTimes | None = None
    """times of its steps; None if vLLM does not report them"""


@dataclass(frozen=True)
class RequestFailed:
    """End of a request that vLLM refused or could not compute."""

    id: str
    reason: str


@dataclass(frozen=True)
class AdapterLoaded:
    """End of a load into a slot. `failure` is empty if the adapter is there."""

    number: int
    failure: str = ""
    seconds: float = field(default=0.0, compare=False)
    """how long it took"""


@dataclass(frozen=True)
class WorkerReports:
    """Answer to `Driver.request_reports`: the adapters of each of vLLM's workers."""

    workers: Sequence[WorkerAdapters]


@dataclass(frozen=True)
class EngineDied:
    """End of vLLM's engine. Nothing further happens."""

    reason: str


Output = NewTokens | RequestFailed | AdapterLoaded | WorkerReports | EngineDied


class AbortSent:
    """Event of node_agent.device_event: it has ended once vLLM has the order to abort a request. Adapters removed from
    then on are removed after the request."""

    def __init__(self) -> None:
        self._sent = threading.Event()

    def set(self) -> None:
        self._sent.set()

    def query(self) -> bool:
        return self._sent.is_set()

    def synchronize(self) -> None:
        self._sent.wait()

    def wait(self) -> None:
        return None


class Driver:
    """Thread with vLLM's engine. Methods other than `take` are called by one thread, the engine's main loop."""

    def __init__(
        self,
        make: Callable[[], AsyncEngine],
        on_output: Callable[[], None],
        check: Callable[[AsyncEngine], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`make` starts vLLM's engine; it is called in the new thread. `check` raises if the engine can't be used.
        `on_output` is called in the thread, too, when `take` has something new. Call `wait` next."""
        self._make, self._check, self._on_output = make, check, on_output
        self.last_sign = time.monotonic()
        """time of the last token or answer from vLLM, in monotonic seconds"""
        self._outputs: deque[Output] = deque()
        self._loop = asyncio.new_event_loop()
        self._engine: Future[AsyncEngine] = Future()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._orders: asyncio.Queue[Callable[[], Any]] = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> AsyncEngine:
        """Returns vLLM's engine once it has started. Raises what its start raised, and TimeoutError."""
        return self._engine.result(seconds)

    def take(self) -> list[Output]:
        """Returns what has happened since the last call, in order."""
        outputs: list[Output] = []
        while self._outputs:
            outputs.append(self._outputs.popleft())
        return outputs

    def generate(self, id: str, prompt: Any, parameters: Any, lora_request: Any) -> None:
        """Gives vLLM a request. `take` returns its outputs."""
        self._call(self._start, id, prompt, parameters, lora_request)

    def abort(self, id: str) -> AbortSent:
        """Ends a request, which has no further outputs. Does nothing if it has ended."""
        sent = AbortSent()
        self._call(self._abort, id, sent)
        return sent

    def add_adapter(self, number: int, lora_request: Any) -> None:
        """Loads an adapter into a free slot. `take` returns an AdapterLoaded of this number."""
        self._call(self._orders.put_nowait, lambda: self._add(number, lora_request))

    def remove_adapter(self, number: int) -> None:
        """Frees an adapter's slot, before any later load."""
        self._call(self._orders.put_nowait, lambda: self._remove(number))

    def request_reports(self) -> None:
        """Asks the workers for their adapters, after all earlier loads and removals. `take` returns WorkerReports."""
        self._call(self._orders.put_nowait, self._request_reports)

    def close(self) -> None:
        """Ends vLLM's processes and the thread. Returns after CLOSE_S at the latest."""
        self._call(self._loop.stop)
        self._thread.join(CLOSE_S)

    # --- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            engine = self._loop.run_until_complete(self._started())
        except BaseException as error:  # for the main thread
            self._engine.set_exception(error)
            return
        self._engine.set_result(engine)
        orders = self._loop.create_task(self._follow())
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._cancel([orders, *self._tasks.values()]))
            engine.shutdown()

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancels the tasks, and waits at most CANCEL_S seconds for their ends."""
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CANCEL_S)

    async def _started(self) -> AsyncEngine:
        engine = self._make()
        try:
            if self._check is not None:
                await self._check(engine)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _put(self, output: Output) -> None:
        self.last_sign = time.monotonic()
        self._outputs.append(output)
        self._on_output()

    def _start(self, id: str, prompt: Any, parameters: Any, lora_request: Any) -> None:
        self._tasks[id] = self._loop.create_task(self._stream(id, prompt, parameters, lora_request))

    async def _stream(self, id: str, prompt: Any, parameters: Any, lora_request: Any) -> None:
        engine = self._engine.result(0)
        try:
            async for output in engine.generate(prompt, parameters, id, lora_request=lora_request):
                (only,) = output.outputs
                self._put(
                    NewTokens(
                        id,
                        list(only.token_ids),
                        only.logprobs,
                        output.prompt_logprobs,
                        output.num_cached_tokens or 0,
                        output.finished,
                        _times_of(output),
                    )
                )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if _is_death(error):
                self._put(EngineDied(str(error)))
            else:
                self._put(RequestFailed(id, str(error) or type(error).__name__))
        finally:
            self._tasks.pop(id, None)

    def _abort(self, id: str, sent: AbortSent) -> None:
        task = self._tasks.pop(id, None)
        if task is None:
            sent.set()
            self._on_output()
            return
        self._loop.create_task(self._end(id, task, sent))

    async def _end(self, id: str, task: asyncio.Task[None], sent: AbortSent) -> None:
        task.cancel()
        await asyncio.wait([task])  # vLLM may have been about to take the request
        try:
            await self._engine.result(0).abort(id)
        except Exception as error:
            self._put(EngineDied(str(error)))
        finally:
            sent.set()
            self._on_output()

    async def _follow(self) -> None:
        """Carries out loads and removals of adapters, one at a time."""
        while True:
            order = await self._orders.get()
            await order()
            self.last_sign = time.monotonic()

    async def _add(self, number: int, lora_request: Any) -> None:
        failure, began = "", time.monotonic()
        try:
            if not await self._engine.result(0).add_lora(lora_request):
                failure = "vLLM did not load it"
        except Exception as error:
            if _is_death(error):
                self._put(EngineDied(str(error)))
                return
            failure = str(error) or type(error).__name__
            await self._remove_rest(number)
        self._put(AdapterLoaded(number, failure, time.monotonic() - began))

    async def _remove_rest(self, number: int) -> None:
        """Removes what a failed load may have left in vLLM's host memory."""
        try:
            await self._engine.result(0).remove_lora(number)
        except Exception as error:
            self._put(EngineDied(str(error)))

    async def _request_reports(self) -> None:
        try:
            self._put(WorkerReports(await self._engine.result(0).collective_rpc(ADAPTERS_METHOD)))
        except Exception as error:
            self._put(EngineDied(str(error)))

    async def _remove(self, number: int) -> None:
        try:
            if not await self._engine.result(0).remove_lora(number):
                log.warning("vLLM had not loaded the adapter that was to be removed", extra={"number": number})
        except Exception as error:
            self._put(EngineDied(str(error)))


def _times_of(output: Any) -> TokenTimes | None:
    """Returns the times of an output of vLLM, which it has where its statistics are on."""
    metrics = getattr(output, "metrics", None)
    return None if metrics is None else TokenTimes(metrics.scheduled_ts, metrics.last_token_ts)


def _is_death(error: Exception) -> bool:
    """Returns whether vLLM's engine has ended. The class is compared by name: only vLLM's environment can import it."""
    return type(error).__name__ == "EngineDeadError"
