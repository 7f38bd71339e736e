"""Small parts by themselves: labels, counters, threads, field names, log lines."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import StoreUnavailable
from cluster.errors import ServiceError
from gateway.calls.active_calls import ActiveCalls
from gateway.catalog import threads as threads_module
from gateway.catalog.threads import READ_THREADS, LeavableThreads, StoreThreads
from gateway.http.bodies import convert, field_of
from gateway.workers.last_hour import Counts, LastHour
from gateway.workers.metrics import LabelCap


def test_labels_are_capped() -> None:
    cap = LabelCap(2)
    assert [cap(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_last_hour_forgets_minutes() -> None:
    now = 0.0
    hour = LastHour(lambda: now)
    hour.record("t", "f", Counts(invocations=1))
    now = 59 * 60.0
    hour.record("t", "f", Counts(invocations=2))
    assert hour.of("t/f")[0].invocations == 3
    now = 60 * 60.0
    assert hour.of("t/f")[0].invocations == 2
    assert hour.of("t/g")[0].invocations == 0


def count(running: ActiveCalls) -> int:
    """Returns how many generations it has."""
    return sum(len(futures) for futures in running._revoked.values())


def test_revoking_reaches_only_its_function() -> None:
    async def main() -> None:
        running = ActiveCalls()
        now = time.monotonic()
        with (
            running.track("t", "f", now) as first,
            running.track("t", "f", now) as second,
            running.track("u", "f", now) as other,
        ):
            assert count(running) == 3
            running.cancel("t", "f", ServiceError("cancelled", "gone"), "1")
            assert (first.done(), second.done(), other.done()) == (True, True, False)
        assert count(running) == 0

    asyncio.run(main())


def test_calls_received_before_a_revocation_are_ended_when_they_come_to_run() -> None:
    async def main() -> None:
        running = ActiveCalls()
        before = time.monotonic()
        running.cancel("t", "f", ServiceError("cancelled", "gone"), "1")
        assert count(running) == 0
        with pytest.raises(ServiceError, match="gone"), running.track("t", "f", before):
            pass
        with running.track("u", "f", before), running.track("t", "f", time.monotonic() + 1):
            assert count(running) == 2
        assert count(running) == 0

    asyncio.run(main())


def test_a_store_that_does_not_answer_is_given_up() -> None:
    async def main() -> None:
        answer = threading.Event()
        threads = StoreThreads(0.05)
        with pytest.raises(StoreUnavailable):
            await threads.read(answer.wait, 30)
        answer.set()

    asyncio.run(main())


def test_reads_that_hang_take_no_more_threads_than_there_are() -> None:
    hung, answer = [], threading.Event()

    def hang() -> str:
        hung.append(threading.current_thread())
        answer.wait(60)
        return "late"

    async def main() -> None:
        threads = StoreThreads(0.05)
        for _ in range(2 * READ_THREADS):
            with pytest.raises(StoreUnavailable):
                await threads.read(hang)
        assert len(hung) == READ_THREADS
        with pytest.raises(StoreUnavailable, match="still hang"):
            await threads.read(hang)
        answer.set()
        for thread in hung:
            await asyncio.to_thread(thread.join)
        assert await StoreThreads(60.0).read(str, 1) == "1"  # its end is told to the loop after theirs
        assert await threads.read(hang) == "late"

    asyncio.run(main())


def test_a_place_is_free_again_whatever_becomes_of_the_call() -> None:
    async def main() -> None:
        threads = LeavableThreads(1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await threads.run(lambda: 1 // 0)
        held = threading.Event()
        first = asyncio.ensure_future(threads.run(lambda: held.wait(60)))
        waiting = asyncio.ensure_future(threads.run(lambda: 2))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        held.set()
        assert await first is True
        assert await threads.run(lambda: 3) == 3
        assert threads.abandoned == 0

    asyncio.run(main())


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_place_is_free_again_if_no_thread_starts(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> threading.Thread:
        raise error

    async def main() -> None:
        stores = StoreThreads(60.0, writes=1, reads=1)
        for work in (stores.read, stores.write):
            with monkeypatch.context() as patch:
                patch.setattr(threads_module, "Thread", start)
                for _ in range(3):
                    with pytest.raises(type(error)):
                        await work(str, 1)
            async with asyncio.timeout(60):
                assert await work(str, 1) == "1"

    asyncio.run(main())


def test_a_write_whose_caller_was_cancelled_keeps_its_place_until_it_ends() -> None:
    async def main() -> None:
        begun, answer, ended = threading.Event(), threading.Event(), threading.Event()

        def write() -> None:
            begun.set()
            answer.wait(60)
            ended.set()

        threads = StoreThreads(0.05, writes=1)
        left = asyncio.ensure_future(threads.write(write))
        assert await asyncio.to_thread(begun.wait, 60)
        left.cancel()
        await asyncio.wait({left})
        with pytest.raises(StoreUnavailable):
            await threads.write(str, 1)
        answer.set()
        assert await asyncio.to_thread(ended.wait, 60)
        async with asyncio.timeout(60):
            while True:
                with suppress(StoreUnavailable):
                    assert await threads.write(str, 1) == "1"
                    break

    asyncio.run(main())


def test_writes_wait_for_a_thread_only_so_long() -> None:
    async def main() -> None:
        answer = threading.Event()
        threads = StoreThreads(0.05)
        running = [asyncio.ensure_future(threads.write(answer.wait, 60)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable):
            await threads.write(answer.wait, 60)
        answer.set()
        assert await asyncio.gather(*running) == [True] * 4

    asyncio.run(main())


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: list[Inner]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"inner": [{"number": "x"}]}, "inner[0].number"),
        ({"inner": [{"number": 1}, {}]}, "inner[1].number"),
        ({"inner": [], "odd": 1}, "odd"),
        ({"inner": 3}, "inner"),
        ({}, "inner"),
        ([], None),
    ],
)
def test_errors_name_the_field(value: object, param: str | None) -> None:
    with pytest.raises(ServiceError) as caught:
        convert(value, Outer)
    assert (caught.value.type, caught.value.param) == ("validation_failed", param)


@given(st.text())
def test_any_message_has_a_field_or_none(message: str) -> None:
    assert field_of(message) is None or isinstance(field_of(message), str)
