"""Runs work that ends early if its caller disconnects, or because of another external event.

The work runs in its caller's task. A separate task would start, and be seen to end, one iteration of the event loop
later. In each iteration the caller would wait for the tokens of all other streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from gateway.http.errors import ClientGone

T = TypeVar("T")


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Returns the result of `work`. If the caller disconnects, `work` is cancelled and ClientGone is raised.

    The request's body must have been read to its end.
    """
    disconnection = asyncio.ensure_future(_disconnected(receive))
    try:
        with cut_short(disconnection):
            return await work
    finally:
        disconnection.cancel()
        await asyncio.gather(disconnection, return_exceptions=True)


@contextmanager
def cut_short(by: asyncio.Future[Exception]) -> Iterator[None]:
    """Cancels the `with` block when `by` gets a result, and raises that result. The block runs in its caller's task."""
    task = asyncio.current_task()
    assert task is not None
    other_cancels, cut, is_over = task.cancelling(), False, False

    def cancel(_: asyncio.Future[Exception]) -> None:
        nonlocal cut
        if not by.cancelled() and not is_over:
            cut = True
            task.cancel()

    by.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if cut and task.cancelling() - 1 <= other_cancels:
            raise (by.exception() or by.result()) from None
        raise
    finally:
        is_over = True  # once `by` is done, its callbacks are scheduled and can't be removed any more
        by.remove_done_callback(cancel)
        if cut:
            task.uncancel()


async def _disconnected(receive: Receive) -> Exception:
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone()
