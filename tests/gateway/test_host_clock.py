"""This host's clock beside the registry's: each change is logged once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from time import monotonic, time

import pytest

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from gateway.catalog.threads import StoreThreads
from gateway.jobs.clocks import StoreClock
from gateway.jobs.host_clock import CLOCK_SECONDS, HostClock
from tests.gateway.events.event_world import World


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """lines() -> what was logged since."""

    def since() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, logger="gateway"):
        yield since


def watched(store: LocalStore, work: Callable[[HostClock, list[float]], Awaitable[None]]) -> None:
    """Runs `work` with a watch, and a list whose only entry is by how much this host's clock is set forward."""
    ahead = [0.0]

    async def main() -> None:
        clock = StoreClock(store, StoreThreads(10.0, 1), monotonic)
        await work(HostClock(clock, lambda: time() + ahead[0]), ahead)

    asyncio.run(main())


def test_each_change_is_logged_once(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    async def work(watch: HostClock, ahead: list[float]) -> None:
        for seconds, expected in [
            (0, ""), (CLOCK_SECONDS / 2, ""), (3600, "+3600 s from"), (3610, ""), (7200, "+7200 s from"),
            (-7200, "-7200 s from"), (CLOCK_SECONDS * 0.9, "by +54 s"), (0, ""), (CLOCK_SECONDS + 5, "+65 s from"),
            (CLOCK_SECONDS - 5, ""), (CLOCK_SECONDS + 5, ""), (0, "clock is right again"), (0, ""),
        ]:  # fmt: skip
            ahead[0] = seconds
            for _ in range(3):
                await watch.compare()
            found = lines()
            assert len(found) == bool(expected), (seconds, found)
            assert all(expected in line for line in found)

    watched(LocalStore(tmp_path), work)


def test_the_warning_says_what_comes_of_it(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    async def work(watch: HostClock, ahead: list[float]) -> None:
        ahead[0] = 21600.0
        await watch.compare()

    watched(LocalStore(tmp_path), work)
    (line,) = lines()
    assert "webhook-timestamp" in line
    assert "usage" in line


def test_a_registry_on_this_host_is_set_with_it(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    """Both clocks are one. The store's is read again before anything is said."""
    world = World(tmp_path)

    async def work(watch: HostClock, ahead: list[float]) -> None:
        await watch.compare()
        world.pass_time(86400)
        ahead[0] = 86400.0
        await watch.compare()

    watched(world.store(), work)
    assert lines() == []


def test_a_store_that_is_away_says_nothing(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    store = LocalStore(tmp_path)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()

    async def work(watch: HostClock, _: list[float]) -> None:
        with pytest.raises(StoreUnavailable):
            await watch.compare()

    watched(store, work)
    assert lines() == []
