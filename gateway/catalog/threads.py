"""Runs blocking calls off the event loop, in a limited number of threads and for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import ParamSpec, TypeVar

from adapters.errors import StoreUnavailable
from gateway.places.places import Places, Pool, owner_now

P = ParamSpec("P")
T = TypeVar("T")

READ_THREADS = 16
WRITE_THREADS = 4


class NoThread(RuntimeError):
    """Raised when the system can't start another thread."""


class LeavableThreads:
    """Pool that runs each call in its own thread, in a place of the tenant for which the task works (`owner_now`).

    A caller may be cancelled, but its place becomes free only when the thread has ended. So calls that hang can't pile
    up.
    """

    def __init__(self, places: Places | int, *, cut_off: bool = True) -> None:
        """`places`: those of a shared pool, or the number of calls that run at once if only the service itself
        calls. `cut_off`: the end of the process does not wait for running calls."""
        self._cut_off = cut_off
        self.abandoned = 0
        """Number of running calls whose callers were cancelled."""
        self.places = _places(places)

    async def run(self, work: Callable[[], T], wait_s: float | None = None) -> T:
        """Runs the work in a thread and returns its result. Waits at most `wait_s` seconds for a place; callers set
        their own timeouts if it is None.

        Raises NoThread, the exceptions of `work`, and ServiceError `overloaded` without a place.
        """
        owner = owner_now.get()
        await self.places.acquire(owner, wait_s)
        return await self.run_held(owner, work)

    async def run_held(self, owner: str, work: Callable[[], T]) -> T:
        """Runs the work as `run`, in a place of the owner that the caller has acquired. The place is released when the
        thread has ended."""
        try:
            outcome: Future[T] = Future()
            outcome.set_running_or_notify_cancel()  # a cancelled caller must not cancel it: the thread will set it
            ended = asyncio.wrap_future(outcome)
            _start(Thread(target=_run, args=(work, outcome), daemon=self._cut_off, name="leavable"))
        except BaseException:  # for instance, the system can start no more threads, or has no memory
            self.places.release(owner)
            raise
        ended.add_done_callback(partial(self._end, owner))
        try:
            await asyncio.wait({ended})  # unlike a plain await, cancellation does not cancel `ended`
        finally:
            if not ended.done():
                self.abandoned += 1
                ended.add_done_callback(self._end_left)
        return ended.result()

    def _end(self, owner: str, ended: asyncio.Future[T]) -> None:
        self.places.release(owner)
        if not ended.cancelled():
            ended.exception()  # retrieved, because the caller may have been cancelled

    def _end_left(self, _: asyncio.Future[T]) -> None:
        self.abandoned -= 1


def _start(thread: Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread(str(error)) from error


def _run(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:  # for the caller
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def _places(places: Places | int) -> Places:
    if isinstance(places, Places):
        return places
    return Places(Pool(name="own", work="calls", size=places, per_tenant=max(1, places - 1)))


class StoreThreads:
    """Threads for the store. Reads are abandoned after `seconds`; writes run to their end, because they can't be
    undone."""

    def __init__(
        self, seconds: float, writes: Places | int = WRITE_THREADS, reads: Places | int = READ_THREADS
    ) -> None:
        self._seconds = seconds
        self._reads = LeavableThreads(reads)
        self._writes = LeavableThreads(writes, cut_off=False)

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of a read.

        Raises StoreUnavailable if the store does not answer in time, or if no thread becomes free in time. Raises it at
        once while abandoned reads occupy all threads, or if the system can't start a thread.
        """
        if self._reads.abandoned >= self._reads.places.pool.size:
            raise StoreUnavailable(f"{self._reads.abandoned} earlier reads of the registry still hang")
        try:
            async with asyncio.timeout(self._seconds):
                return await self._reads.run(partial(call, *args, **kwargs))
        except TimeoutError:
            raise self._late() from None
        except NoThread as error:
            raise StoreUnavailable(f"the registry was not read: {error}") from error

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of a write. The write continues if the caller is cancelled, in its place, so its temporary
        files must outlive it.

        Raises StoreUnavailable if no thread becomes free in time, or if the system can't start one.
        """
        owner = owner_now.get()
        try:
            async with asyncio.timeout(self._seconds):
                await self._writes.places.acquire(owner)
        except TimeoutError:
            raise self._late() from None
        try:
            return await self._writes.run_held(owner, partial(call, *args, **kwargs))
        except NoThread as error:
            raise StoreUnavailable(f"the registry was not written to: {error}") from error

    def _late(self) -> StoreUnavailable:
        return StoreUnavailable(f"no answer from the registry within {self._seconds:g} s")
