"""Blocking calls, kept off the event loop in bounded threads for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

from adapters.errors import StoreUnavailable

P = ParamSpec("P")
T = TypeVar("T")

READ_THREADS = 16
WRITE_THREADS = 4


class LeavableThreads:
    """Runs at most `count` calls at once, each in its own thread. A caller may leave (be cancelled), but its place is
    free only when the thread has ended: calls that hang can't pile up."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.abandoned = 0
        """Calls that still run although nobody waits for them any more."""
        self._places = asyncio.Semaphore(count)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs the work in one of the threads and returns its result. Raises what `work` raises. Waits for a place
        without bound: callers set their own."""
        await self._places.acquire()
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()  # so that leaving does not cancel it: the thread will still set it
        try:
            # A daemon, so that a call that hangs does not hold up the end of the process.
            Thread(target=_run, args=(work, outcome), daemon=True, name="leavable").start()
        except RuntimeError:  # the system gives no more threads
            self._places.release()
            raise
        ended = asyncio.wrap_future(outcome)
        ended.add_done_callback(self._end)
        try:
            await asyncio.wait({ended})  # unlike a plain await, it leaves `ended` alone when it is cancelled
        finally:
            if not ended.done():
                self.abandoned += 1
                ended.add_done_callback(self._end_left)
        return ended.result()

    def _end(self, ended: asyncio.Future[T]) -> None:
        self._places.release()
        if not ended.cancelled():
            ended.exception()  # retrieved: whoever waited may have left

    def _end_left(self, _: asyncio.Future[T]) -> None:
        self.abandoned -= 1


def _run(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:  # belongs to whoever waits
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


class StoreThreads:
    """Reads are given up after `seconds`; writes run to their end, because half of one can't be taken back."""

    def __init__(self, seconds: float, writes: int = WRITE_THREADS) -> None:
        self._seconds = seconds
        self._reads = LeavableThreads(READ_THREADS)
        self._writes = asyncio.Semaphore(writes)
        self._write_limiter = anyio.CapacityLimiter(writes)

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of a read. Raises StoreUnavailable when the store (or a free thread) does not answer in
        time.

        Raises it at once while earlier reads that were given up hang in all threads.
        """
        if self._reads.abandoned >= self._reads.count:
            raise StoreUnavailable(f"{self._reads.abandoned} earlier reads of the registry still hang")
        try:
            async with asyncio.timeout(self._seconds):
                return await self._reads.run(partial(call, *args, **kwargs))
        except TimeoutError:
            raise self._late() from None

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Not abandoned when the caller goes: what the thread uses (temporary files) must outlive it.

        Raises StoreUnavailable when other writes leave no free thread in time."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._writes.acquire()
        except TimeoutError:
            raise self._late() from None
        try:
            return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=self._write_limiter)
        finally:
            self._writes.release()

    def _late(self) -> StoreUnavailable:
        return StoreUnavailable(f"no answer from the registry within {self._seconds:g} s")
