"""Runs blocking calls off the event loop, in a limited number of threads and for a limited time."""

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
from gateway.http.errors import exhausted_resource

P = ParamSpec("P")
T = TypeVar("T")

READ_THREADS = 16
WRITE_THREADS = 4


class NoThread(RuntimeError):
    """Error: the system can't start another thread."""


class LeavableThreads:
    """Pool that runs at most `count` calls at once, each in its own thread.

    A caller may be cancelled, but its place becomes free only when the thread has ended. So calls that hang can't pile
    up.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.abandoned = 0
        """Number of running calls whose callers were cancelled."""
        self._places = asyncio.Semaphore(count)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs the work in a thread and returns its result. Raises NoThread, and the exceptions of `work`.

        The wait for a free place is unlimited; callers set their own timeouts.
        """
        await self._places.acquire()
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()  # a cancelled caller must not cancel it, because the thread will set it
        try:
            # A daemon thread, so that a call that hangs does not delay the end of the process.
            Thread(target=_run, args=(work, outcome), daemon=True, name="leavable").start()
        except RuntimeError as error:
            self._places.release()
            raise NoThread(str(error)) from error
        ended = asyncio.wrap_future(outcome)
        ended.add_done_callback(self._end)
        try:
            await asyncio.wait({ended})  # unlike a plain await, cancellation does not cancel `ended`
        finally:
            if not ended.done():
                self.abandoned += 1
                ended.add_done_callback(self._end_left)
        return ended.result()

    def _end(self, ended: asyncio.Future[T]) -> None:
        self._places.release()
        if not ended.cancelled():
            ended.exception()  # retrieved, because the caller may have been cancelled

    def _end_left(self, _: asyncio.Future[T]) -> None:
        self.abandoned -= 1


def _run(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:  # for the caller
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


class StoreThreads:
    """Threads for the store. Reads are abandoned after `seconds`; writes run to their end, because they can't be
    undone."""

    def __init__(self, seconds: float, writes: int = WRITE_THREADS) -> None:
        self._seconds = seconds
        self._reads = LeavableThreads(READ_THREADS)
        self._writes = asyncio.Semaphore(writes)
        self._write_limiter = anyio.CapacityLimiter(writes)

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of a read.

        Raises StoreUnavailable if the store does not answer in time, or if no thread becomes free in time. Raises it at
        once while abandoned reads occupy all threads, or if the system can't start a thread.
        """
        if self._reads.abandoned >= self._reads.count:
            raise StoreUnavailable(f"{self._reads.abandoned} earlier reads of the registry still hang")
        try:
            async with asyncio.timeout(self._seconds):
                return await self._reads.run(partial(call, *args, **kwargs))
        except TimeoutError:
            raise self._late() from None
        except NoThread as error:
            raise StoreUnavailable(f"the registry was not asked: {error}") from error

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of a write. The write continues if the caller is cancelled, so its temporary files must
        outlive it.

        Raises StoreUnavailable if no thread becomes free in time, or if the system can't start one.
        """
        try:
            async with asyncio.timeout(self._seconds):
                await self._writes.acquire()
        except TimeoutError:
            raise self._late() from None
        try:
            return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=self._write_limiter)
        except RuntimeError as error:
            if not exhausted_resource(error):
                raise
            raise StoreUnavailable(f"the registry was not written to: {error}") from error
        finally:
            self._writes.release()

    def _late(self) -> StoreUnavailable:
        return StoreUnavailable(f"no answer from the registry within {self._seconds:g} s")
