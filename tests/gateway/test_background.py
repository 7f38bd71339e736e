"""Tasks beside the requests that meet what nobody expected: they are logged, and go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

from adapters.epoch import Epoch
from adapters.local_store import LocalStore
from cluster.leases import MemoryLeases
from cluster.redis_link import RedisLink
from cluster.state import ClusterState
from gateway import background as module
from gateway.background import background
from gateway.calls.scale_from_zero import FirstNodeWait
from gateway.catalog import name_watch
from gateway.catalog.name_watch import NameWatch
from gateway.catalog.threads import StoreThreads
from gateway.usage import ledger
from gateway.usage.counts import UsageCounts
from gateway.workers.attainment import Attainment
from gateway.workers.last_hour import LastHour
from gateway.workers.peers import Peers, TenantChanged
from gateway.workers.pool_loads import PoolLoads
from gateway.workers.windows import Windows

PATIENCE = 20.0
LOGGED = "a background task failed; it is started again"


class Surprise(Exception):
    pass


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.0)


class Faulty:
    """Fails the first time that it is called."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.calls = answer, 0
        self.went_on = asyncio.Event()

    def __call__(self, *_: object) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise Surprise
        self.went_on.set()
        return self.answer

    async def asked(self, *_: object) -> Any:
        return self()


def run(main: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    with caplog.at_level(logging.ERROR, "gateway"):
        asyncio.run(bounded())
    found = [record for record in caplog.records if record.exc_info and record.exc_info[0] is Surprise]
    assert [record.getMessage() for record in found] == [LOGGED]


def test_work_begins_anew_until_the_context_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        faulty, ended = Faulty(), asyncio.Event()

        async def forever() -> None:
            try:
                faulty()
                await asyncio.Event().wait()
            finally:
                if faulty.went_on.is_set():
                    ended.set()

        async def once() -> None:
            return

        async with background(once, forever):
            await faulty.went_on.wait()
        assert (faulty.calls, ended.is_set()) == (2, True)

    run(main, caplog)


def test_the_epoch_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        faulty = Faulty(Epoch("e", 0.0))
        monkeypatch.setattr(name_watch, "read_epoch", faulty)
        watch = NameWatch(LocalStore(tmp_path), StoreThreads(10.0), monotonic, 0.01)
        async with watch.running():
            while faulty.calls < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(main, caplog)


class Link:
    """Of a Redis that can be reached, and takes what it is told at the second time."""

    worker = "w"

    def __init__(self) -> None:
        self.on_message: dict[str, object] = {}
        self.faulty = Faulty(0)
        self.send = self.run = self.faulty.asked

    def key(self, *parts: str) -> str:
        return ":".join(parts)


def test_windows_are_told_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("gateway.workers.windows.FLUSH_SECONDS", 0.01)

    async def main() -> None:
        link = Link()
        windows = Windows(cast(RedisLink, link), LastHour(monotonic), Attainment(monotonic), PoolLoads(monotonic))
        async with windows.running():
            await link.faulty.went_on.wait()

    run(main, caplog)


def test_what_waits_for_the_peers_is_sent_on(caplog: pytest.LogCaptureFixture) -> None:
    """Although nothing else is told after the failure."""

    async def main() -> None:
        link = Link()
        peers = Peers(cast(RedisLink, link))
        for number in range(300):  # two letters
            peers.publish(TenantChanged(f"t{number}"))
        async with peers.running():
            await link.faulty.went_on.wait()

    run(main, caplog)


def test_usage_is_written_whatever_was_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that meets what it can't take over still writes its own."""

    async def main() -> None:
        folder, store = tmp_path / "usage", LocalStore(tmp_path / "registry")
        monkeypatch.setattr(ledger, "abandoned_journals", Faulty(()))
        async with ledger.open_ledger(folder, store, seconds=0.01) as opened:
            opened.add("acme", "f", "1", UsageCounts(1, 2, 3))
            while not store.list("tenants/acme/usage/"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(main, caplog)


def test_a_held_call_hears_why_nobody_looks_for_a_node() -> None:
    class State:
        table = Faulty().asked

    async def main() -> None:
        hold = FirstNodeWait(cast(ClusterState, State), MemoryLeases(monotonic), "base", 60.0, monotonic)
        with pytest.raises(Surprise):
            await hold.wait(monotonic() + PATIENCE, asyncio.get_running_loop().create_future())

    asyncio.run(main())
