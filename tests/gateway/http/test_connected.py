"""A block that is cut short from outside: told why, once, and nothing of it is left in its task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from gateway.http.connected import cut_short, while_connected
from gateway.http.errors import ClientGone


class Cut(Exception):
    pass


def run(test: Callable[[asyncio.Future[Exception]], Awaitable[None]]) -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        await test(asyncio.get_running_loop().create_future())
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # no cancellation is still to come

    asyncio.run(main())


def soon(by: asyncio.Future[Exception]) -> None:
    asyncio.get_running_loop().call_soon(by.set_result, Cut())


def test_the_reason_is_raised_and_what_ran_has_ended() -> None:
    ended: list[str] = []

    async def test(by: asyncio.Future[Exception]) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cleaned up")

        soon(by)
        with pytest.raises(Cut), cut_short(by):
            await work()

    run(test)
    assert ended == ["cleaned up"]


def test_a_block_that_is_faster_hears_nothing() -> None:
    async def test(by: asyncio.Future[Exception]) -> None:
        with cut_short(by):
            await asyncio.sleep(0)
        by.set_result(Cut())
        await asyncio.sleep(0)

    run(test)


def test_a_block_that_ends_in_the_same_turn_hears_nothing() -> None:
    async def test(by: asyncio.Future[Exception]) -> None:
        with cut_short(by):
            by.set_result(Cut())
        await asyncio.sleep(0)

    run(test)


def test_a_caller_that_goes_in_the_turn_in_which_the_work_ends() -> None:
    async def test(_: asyncio.Future[Exception]) -> None:
        at_once = asyncio.Event()

        async def receive() -> dict[str, str]:
            await at_once.wait()
            return {"type": "http.disconnect"}

        async def work() -> int:
            await asyncio.sleep(0)  # the other one waits by now
            at_once.set()
            await asyncio.sleep(0)
            return 7

        assert await while_connected(work(), receive) == 7

    run(test)


def test_a_block_that_takes_no_notice_ends_as_it_likes() -> None:
    async def test(by: asyncio.Future[Exception]) -> None:
        soon(by)
        with cut_short(by), suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    run(test)


def test_a_reason_that_was_there_before() -> None:
    async def test(by: asyncio.Future[Exception]) -> None:
        by.set_result(Cut())
        with pytest.raises(Cut), cut_short(by):
            await asyncio.sleep(60)

    run(test)


@pytest.mark.parametrize("cut_too", [False, True])
def test_a_deadline_and_a_cancellation_stay_what_they_are(cut_too: bool) -> None:
    async def test(by: asyncio.Future[Exception]) -> None:
        if cut_too:
            soon(by)

        async def late() -> None:
            async with asyncio.timeout(0):
                with cut_short(by):
                    await asyncio.sleep(60)

        with pytest.raises(TimeoutError):
            await late()

        async def work() -> None:
            with cut_short(by if not cut_too else asyncio.get_running_loop().create_future()):
                await asyncio.sleep(60)

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)


@pytest.mark.parametrize("goes", [False, True])
def test_work_of_a_caller(goes: bool) -> None:
    async def test(_: asyncio.Future[Exception]) -> None:
        async def receive() -> dict[str, str]:
            if not goes:
                await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def work() -> int:
            await asyncio.sleep(60 if goes else 0)
            return 7

        if goes:
            with pytest.raises(ClientGone):
                await while_connected(work(), receive)
        else:
            assert await while_connected(work(), receive) == 7

    run(test)
