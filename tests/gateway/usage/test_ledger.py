"""Sums of usage: whatever dies, flushes or takes over in between, each call counts once."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from usage_worlds import Crash, Watched, age, compact, crash_at

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.open_store import open_store
from adapters.store import ObjectStore
from gateway.usage import ledger as ledger_module
from gateway.usage.counts import UsageCounts
from gateway.usage.hours import HOUR, hour_name, hour_start
from gateway.usage.journal import JournalError, abandoned_journals, claim_journal
from gateway.usage.ledger import UsageLedger, open_ledger
from gateway.usage.report import GROUPS, Sheet, read_usage
from tests.support.draws import draws

START = 1_790_000_000 // HOUR * HOUR


class Clock:
    def __init__(self) -> None:
        self.now = float(START)

    def __call__(self) -> float:
        return self.now


def counts(number: int) -> UsageCounts:
    return UsageCounts(1, number, 2 * number, number % 2)


def told(store: ObjectStore, tenant: str, newer: dict[str, bytes] | None = None) -> Counter[tuple[str, str, str]]:
    """Prompt tokens by hour, function and version."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for cell, found in read_usage(store, tenant, START - 10 * HOUR, START + 400 * HOUR, newer or {}):
        assert found.completion_tokens == 2 * found.prompt_tokens
        sums[cell.hour, cell.function, cell.version] += found.prompt_tokens
    return sums


@asynccontextmanager
async def ledger_in(folder: Path, store: ObjectStore, clock: Clock) -> AsyncIterator[UsageLedger]:
    """Without a background task, so that the test says when it is written; ends as a kill would end it."""
    journal = claim_journal(folder)
    ledger = UsageLedger(journal, store, clock)
    await ledger.begin()
    try:
        yield ledger
    finally:
        journal.close()


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(tmp_path / "registry")
    request.getfixturevalue("s3_endpoint")
    return open_store(f"s3://garnish-tests/{tmp_path.name}")


def test_kept_over_restarts_and_written_once(store: ObjectStore, tmp_path: Path) -> None:
    clock = Clock()

    async def scenario() -> None:
        async with ledger_in(tmp_path / "usage", store, clock) as ledger:
            ledger.add("acme", "f", "1", counts(5))
            assert told(store, "acme") == {}
            hour = hour_name(clock())
            assert told(store, "acme", ledger.unwritten("acme")) == {(hour, "f", "1"): 5}
        async with ledger_in(tmp_path / "usage", store, clock) as ledger:  # after a kill
            assert await ledger.flush()
            assert told(store, "acme") == {(hour, "f", "1"): 5}
            ledger.add("acme", "f", "1", counts(7))
            ledger.add("acme", "f", "2", counts(1))
            ledger.add("other", "f", "1", counts(100))
            await ledger.flush()
            await ledger.flush()
        async with ledger_in(tmp_path / "usage", store, clock) as ledger:
            await ledger.flush()
            assert told(store, "acme") == {(hour, "f", "1"): 12, (hour, "f", "2"): 1}
            assert told(store, "other") == {(hour, "f", "1"): 100}
            assert len(store.list("tenants/acme/usage/")) == 1
            clock.now += HOUR
            ledger.add("acme", "f", "1", counts(3))
            await ledger.flush()
            clock.now -= HOUR  # as a corrected clock does
            ledger.add("acme", "f", "1", counts(9))
            await ledger.flush()
        assert told(store, "acme") == {
            (hour, "f", "1"): 21,
            (hour, "f", "2"): 1,
            (hour_name(clock() + HOUR), "f", "1"): 3,
        }

    asyncio.run(scenario())


def test_who_was_late_writes_what_has_been_merged_once_more(store: ObjectStore, tmp_path: Path) -> None:
    """A gateway that was cut off for days: its hour is merged as far as it had been written, and the rest is added."""
    clock, quiet = Clock(), START + 100 * HOUR if isinstance(store, LocalStore) else time.time() + HOUR

    async def scenario() -> None:
        async with ledger_in(tmp_path / "usage", store, clock) as ledger:
            hour = hour_name(clock())
            ledger.add("acme", "f", "1", counts(5))
            await ledger.flush()
            ledger.add("acme", "f", "1", counts(7))
        clock.now += 99 * HOUR
        if isinstance(store, LocalStore):
            age(store)
        compact(store, quiet)
        assert told(store, "acme") == {(hour, "f", "1"): 5}
        async with ledger_in(tmp_path / "usage", store, clock) as ledger:
            assert told(store, "acme", ledger.unwritten("acme")) == {(hour, "f", "1"): 12}
            await ledger.flush()
            (late,) = [info.key for info in store.list(f"tenants/acme/usage/{hour}/")]
            assert late.endswith("-2.json"), "a name of its own, with the number of calls"
            assert told(store, "acme") == {(hour, "f", "1"): 12}
        if isinstance(store, LocalStore):
            age(store)
        compact(store, quiet)
        assert told(store, "acme") == {(hour, "f", "1"): 12}
        assert not store.list(f"tenants/acme/usage/{hour}/")

    asyncio.run(scenario())


def test_the_whole_ledger_writes_at_its_end(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path / "registry"), Clock()

    async def scenario() -> None:
        async with open_ledger(tmp_path / "usage", store, clock=clock, seconds=600) as ledger:
            await asyncio.sleep(0)
            ledger.add("acme", "f", "1", counts(5))
        assert sum(told(store, "acme").values()) == 5
        # A process that was killed in a slot that the next one does not get.
        first, second = claim_journal(tmp_path / "usage"), claim_journal(tmp_path / "usage")
        first.close()
        left = UsageLedger(second, store, clock)
        await left.begin()
        left.add("acme", "f", "1", counts(6))
        second.close()
        async with open_ledger(tmp_path / "usage", store, clock=clock, seconds=600):
            pass
        async with open_ledger(tmp_path / "usage", store, clock=clock, seconds=600) as ledger:
            while sum(told(store, "acme").values()) != 11:  # noqa: ASYNC110  (written by a task of its own)
                await asyncio.sleep(0.01)
        assert all(journal.close() is None for journal in abandoned_journals(tmp_path / "usage"))

    asyncio.run(asyncio.wait_for(scenario(), 60))


class Away(LocalStore):
    """A registry that can be away: a `put` then raises, before or after it has taken effect."""

    state = "there"

    def put(self, key: str, data: bytes | Path) -> str:
        if self.state == "away":
            raise StoreUnavailable("away")
        etag = super().put(key, data)
        if self.state == "reply lost":
            raise StoreUnavailable("the reply was lost")
        return etag


class LedgerMachine(RuleBasedStateMachine):
    """Calls, flushes, kills, hours that pass, a registry that comes and goes, a disk that is full."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.store, self.clock = Away(self.folder / "registry"), Clock()
        self.expected: Counter[tuple[str, str, str]] = Counter()
        self._start()

    def _start(self) -> None:
        self.journal = claim_journal(self.folder / "usage")
        self.ledger = UsageLedger(self.journal, self.store, self.clock)
        self.loop.run_until_complete(self.ledger.begin())

    @rule(function=st.sampled_from("fg"), version=st.sampled_from(["1", "base"]), number=st.integers(0, 100))
    def call(self, function: str, version: str, number: int) -> None:
        self.ledger.add("acme", function, version, counts(number))
        self.expected[hour_name(self.clock()), function, version] += number

    @rule(state=st.sampled_from(["there", "away", "reply lost"]))
    def registry(self, state: str) -> None:
        self.store.state = state

    @rule()
    def flush(self) -> None:
        self.loop.run_until_complete(self.ledger.flush())

    @rule()
    def kill(self) -> None:
        self.journal.close()
        self._start()

    @rule()
    def begin_anew(self) -> None:
        self.loop.run_until_complete(self.ledger._begin_next_segment())

    @rule()
    def killed_while_it_begins_anew(self) -> None:
        """The new log is there, the snapshot is not."""
        self.journal.begin_segment()
        self.kill()

    @rule(quiet=st.booleans(), operations=st.integers(0, 40))
    def compaction(self, quiet: bool, operations: int) -> None:
        """Which may die half-way; `quiet`: gateways wrote long ago what lies in the registry."""
        if quiet:
            age(self.store)
        with suppress(Crash):
            compact(Watched(self.store, crash_at(operations)), self.clock())

    @rule(hours=st.sampled_from([-1, 1, 2, 30]))
    def time_passes(self, hours: int) -> None:
        self.clock.now += hours * HOUR

    @rule(version=st.sampled_from(["1", "2"]))
    def a_full_disk(self, version: str) -> None:
        """Lines that can't be written are in the next snapshot."""
        real, self.journal._log = self.journal._log, os.open("/dev/full", os.O_WRONLY)
        size, truncate = self.journal.size, os.ftruncate
        os.ftruncate = lambda *_: None  # /dev/full can't be cut
        try:
            self.call("f", version, 3)
        finally:
            os.ftruncate = truncate
            os.close(self.journal._log)
            self.journal._log = real
        assert self.journal.size == size
        self.flush()

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        if hasattr(self, "ledger"):
            assert +told(self.store, "acme", self.ledger.unwritten("acme")) == +self.expected

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.store.state = "there"
        self.loop.run_until_complete(self.ledger.flush())
        assert +told(self.store, "acme") == +self.expected
        self.journal.close()
        self.loop.close()
        shutil.rmtree(self.folder)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=draws(20), stateful_step_count=30)


def test_the_journal_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "LOG_BYTES", 10_000)
    store, clock = LocalStore(tmp_path / "registry"), Clock()

    async def scenario() -> None:
        async with ledger_in(tmp_path / "usage", store, clock) as ledger:
            for number in range(2000):
                ledger.add("acme", f"f{number % 5}", "1", counts(1))
                if number % 50 == 0:
                    await ledger.flush()
            assert sum(file.stat().st_size for file in (tmp_path / "usage").rglob("*")) < 40_000
            clock.now += HOUR
            await ledger.flush()
            assert ledger.unwritten("acme") == {}
        assert sum(told(store, "acme").values()) == 2000

    asyncio.run(scenario())


def written(tmp_path: Path, lines: int = 3) -> Path:
    async def scenario() -> None:
        async with ledger_in(tmp_path / "usage", LocalStore(tmp_path / "registry"), Clock()) as ledger:
            for number in range(lines):
                ledger.add("acme", "f", "1", counts(number + 1))

    asyncio.run(scenario())
    return max((tmp_path / "usage" / "0").glob("log-*"))


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_half_a_line_at_the_end_is_dropped(tmp_path: Path, cut: int) -> None:
    log = written(tmp_path)
    log.write_bytes(log.read_bytes()[:-cut])
    journal = claim_journal(tmp_path / "usage")
    whole = 6 if cut == 1 else 3
    assert sum(sums.functions["f"]["1"].prompt_tokens for sums in journal.read()) == whole
    journal.close()


@pytest.mark.parametrize("damage", ["log", "snapshot", "id"])
def test_a_damaged_journal_is_told_not_skipped(tmp_path: Path, damage: str) -> None:
    log = written(tmp_path)
    file = {"log": log, "snapshot": max(log.parent.glob("snapshot-*")), "id": log.parent / "id"}[damage]
    file.write_bytes(b"\0" * 30 + file.read_bytes())

    def read() -> None:
        journal = claim_journal(tmp_path / "usage")
        try:
            journal.read()
        finally:
            journal.close()

    with pytest.raises(JournalError, match="move it away"):
        read()


def test_another_process_s_damaged_journal_stops_no_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor the taking over of a third one's."""
    store, clock, folder = LocalStore(tmp_path / "registry"), Clock(), tmp_path / "usage"

    async def scenario() -> None:
        one, two, three = (ledger_in(folder, store, clock) for _ in range(3))
        async with one, two, three as third:
            third.add("acme", "f", "2", counts(3))
        (folder / "1" / "id").write_text("damaged")
        async with open_ledger(folder, store, clock=clock, seconds=0.01) as ledger:
            ledger.add("acme", "f", "1", counts(5))
            wanted = {(hour_name(clock()), "f", "1"): 5, (hour_name(clock()), "f", "2"): 3}
            async with asyncio.timeout(30):
                while told(store, "acme") != wanted:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert str(folder / "1" / "id") in caplog.text


def test_hours() -> None:
    assert hour_name(START + HOUR - 0.001) == hour_name(START)
    assert hour_start(hour_name(START)) == START
    for text in ("2026-11-21", "2026-11-21T5", "x", ""):
        with pytest.raises(ValueError):
            hour_start(text)


def test_all_groupings_have_the_same_sum(tmp_path: Path) -> None:
    store, clock = LocalStore(tmp_path / "registry"), Clock()
    total = 0

    async def scenario() -> None:
        nonlocal total
        async with ledger_in(tmp_path / "usage", store, clock) as ledger:
            for number in range(60):
                ledger.add("acme", f"f{number % 3}", ["1", "2", "base"][number % 3], counts(number))
                clock.now += 300
                total += number
            await ledger.flush()

    asyncio.run(scenario())
    records = list(read_usage(store, "acme", START, START + 10 * HOUR, {}))
    choose: Callable[[int], Any] = lambda mask: [group for bit, group in enumerate(GROUPS) if mask >> bit & 1]  # noqa: E731
    for mask in range(16):
        sheet = Sheet(choose(mask))
        for cell, found in records:
            sheet.add("acme", cell, found)
        rows = list(sheet.ordered())
        assert sum(sums.prompt_tokens for _, sums in rows) == sheet.total.prompt_tokens == total
        assert len(rows) == len({tuple(groups.values()) for groups, _ in rows})
