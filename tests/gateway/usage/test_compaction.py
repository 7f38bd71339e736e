"""Compaction of usage against a plain sum: crashes, several compactors, readers and late writers at every step."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from usage_worlds import (
    FIRST,
    GATEWAYS,
    NOW,
    TENANT,
    Call,
    Crash,
    Stage,
    Told,
    Watched,
    Writer,
    age,
    calls,
    compact,
    counts,
    crash_at,
    levels,
    told,
    turn,
)

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.store import ObjectStore
from gateway.leader.turn import Turn, TurnEnded
from gateway.usage import compaction as compaction_module
from gateway.usage import report as report_module
from gateway.usage.compaction import CLOSED_SECONDS, UsageCompaction
from gateway.usage.hours import HOUR, hour_name, hour_start
from gateway.usage.objects import days_folder, month_key, months_folder, usage_folder, usage_key
from gateway.usage.report import Sheet, sum_usage
from tests.draws import draws

SOME: list[Call] = [
    (0, GATEWAYS[0], "f", "1", 1),
    (0, GATEWAYS[1], "f", "1", 2),
    (1, GATEWAYS[0], "f", "base", 3),
    (30, GATEWAYS[0], "g", "1", 4),
    (50, GATEWAYS[2], "f", "1", 5),
    (5 * 24 + 23, GATEWAYS[0], "f", "1", 6),
]
"""Two months, several days, an hour that is not closed yet at NOW."""


@pytest.fixture(autouse=True)
def worlds_end_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an order of steps that was drawn is the order in which they are taken."""
    monkeypatch.setattr(report_module, "READERS", 1)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(tmp_path / "registry")
    return request.getfixturevalue("new_s3_store")()  # type: ignore[no-any-return]


def now_of(store: ObjectStore) -> float:
    """On S3 objects are as old as they are: only a later `now` finds them quiet."""
    return NOW if isinstance(store, LocalStore) else time.time() + HOUR


def local(made: list[Call]) -> tuple[LocalStore, Writer]:
    store = LocalStore(Path(tempfile.mkdtemp()) / "registry")
    writer = Writer(store)
    writer.write(made)
    age(store)
    return store, writer


def copy_of(store: LocalStore) -> LocalStore:
    folder = Path(tempfile.mkdtemp()) / "registry"
    shutil.copytree(store.root, folder)
    return LocalStore(folder)


def test_hours_become_days_and_days_months(store: ObjectStore) -> None:
    writer = Writer(store)
    writer.write(SOME)
    if isinstance(store, LocalStore):
        age(store)
        assert compact(store, FIRST + 2 * HOUR) == 2
        assert levels(store) == {"hours": 4, "days": 1}, "two closed hours; the day goes on"
        assert told(store) == writer.sums
        assert compact(store) == 3 + 3
        assert levels(store) == {"hours": 1, "months": 2}, "the last hour ended less than CLOSED_SECONDS ago"
        assert compact(store) == 0
    compact(store, now_of(store) + HOUR)
    assert told(store) == writer.sums
    compact(store, now_of(store) + 24 * HOUR)
    assert levels(store) == {"months": 2}
    assert told(store) == writer.sums
    part = told(store, FIRST + HOUR, FIRST + 40 * HOUR)
    inside = {hour_name(FIRST + hours * HOUR) for hours in range(1, 40)}
    assert part == {key: number for key, number in writer.sums.items() if key[0] in inside}


def operations(store: ObjectStore, now: float) -> int:
    """Of a compaction that nothing disturbs."""
    names: list[str] = []
    compact(Watched(store, names.append), now)
    return len(names)


@settings(max_examples=draws(6))
@given(made=calls)
def test_a_crash_before_or_after_any_operation_changes_no_sum(made: list[Call]) -> None:
    world, writer = local(made)
    for number in range(operations(copy_of(world), NOW)):
        for hook in ("before", "after"):
            store = copy_of(world)
            with pytest.raises(Crash):
                compact(Watched(store, **{hook: crash_at(number)}))
            assert told(store) == writer.sums
            age(store)
            compact(store)
            assert told(store) == writer.sums
            assert "days" not in levels(store)
            shutil.rmtree(store.root.parent)
    shutil.rmtree(world.root.parent)


def test_a_crash_on_s3(new_s3_store: Callable[[], ObjectStore]) -> None:
    now, number, ended = time.time() + HOUR, 0, False
    while not ended:
        store = new_s3_store()
        writer = Writer(store)
        writer.write(SOME[:5])
        try:
            hook = "after" if number % 2 else "before"
            compact(Watched(store, **{hook: crash_at(number)}), now)
            ended = True
        except Crash:
            assert told(store) == writer.sums
        compact(store, now)
        assert told(store) == writer.sums
        assert levels(store) == {"months": 2}
        number += 1
    assert number > 20


def test_a_reader_at_any_moment(store: ObjectStore) -> None:
    """After each operation of a compaction; and a compaction after each operation of a reader."""
    writer = Writer(store)
    writer.write(SOME)
    if isinstance(store, LocalStore):
        age(store)
    before = copy_of(store) if isinstance(store, LocalStore) else None

    def look(_: str) -> None:
        assert told(store) == writer.sums

    compact(Watched(store, look, look), now_of(store))
    if before is None:
        return
    reads: list[str] = []
    told(Watched(before, reads.append))  # type: ignore[arg-type]
    for number in range(len(reads)):
        moved, passed = copy_of(before), Counter[str]()

        def meanwhile(_: str, moved: LocalStore = moved, passed: Counter[str] = passed, number: int = number) -> None:
            if passed.total() == number:
                compact(moved)
            passed["reads"] += 1

        assert told(Watched(moved, meanwhile)) == writer.sums  # type: ignore[arg-type]


@given(
    made=calls,
    later=st.lists(st.lists(calls, max_size=2), min_size=1, max_size=2),
    late=st.booleans(),
    choices=st.lists(st.integers(0, 3), max_size=150),
)
def test_compactors_readers_and_a_late_writer_interleaved(
    made: list[Call], later: list[list[list[Call]]], late: bool, choices: list[int]
) -> None:
    """`late`: under new names, as this release writes; else over the old ones, as the previous release does."""
    world, writer = local(made)
    stage = Stage(choices)

    def write() -> None:
        writer.store = stage.store(world, 3)
        for some in later:
            for one in some:
                writer.write(one, late=late)

    def read() -> None:
        for _ in range(2):
            before = Counter(writer.sums)
            found = told(stage.store(world, 2))
            assert all(before[key] <= found[key] for key in before), "each call that was written before"
            seen.append(found)

    seen: list[Told] = []
    stage.play(lambda: compact(stage.store(world, 0)), lambda: compact(stage.store(world, 1)), read, write)
    assert all(found[key] <= writer.sums[key] for found in seen for key in found), "and none twice"
    assert told(world) == writer.sums
    age(world)
    compact(world)
    assert told(world) == writer.sums
    shutil.rmtree(world.root.parent)


@settings(max_examples=draws(5))
@given(made=calls, later=calls, choices=st.lists(st.integers(0, 3), max_size=150))
def test_interleaved_on_s3(
    new_s3_store: Callable[[], ObjectStore], made: list[Call], later: list[Call], choices: list[int]
) -> None:
    world = new_s3_store()
    writer, now, stage = Writer(world), time.time() + HOUR, Stage(choices)
    writer.write(made)

    def write() -> None:
        writer.store = stage.store(world, 2)
        writer.write(later, late=True)

    stage.play(lambda: compact(stage.store(world, 0), now), lambda: compact(stage.store(world, 1), now), write)
    assert told(world) == writer.sums
    compact(world, now)
    assert told(world) == writer.sums


def test_every_single_interruption_by_a_second_compactor() -> None:
    """Which runs to its end at one step of the first one, and by a writer that comes between."""
    world, _ = local(SOME)
    for number in range(operations(copy_of(world), NOW)):
        store = copy_of(world)
        writer, passed = Writer(store), Counter[str]()
        writer.write(SOME)
        age(store)

        def meanwhile(_: str, store=store, writer=writer, passed=passed, number=number) -> None:  # type: ignore[no-untyped-def]
            if passed.total() == number:
                writer.write([(0, GATEWAYS[0], "f", "1", 7), (30, GATEWAYS[3], "g", "2", 1)])
                compact(store)
            passed["steps"] += 1

        compact(Watched(store, meanwhile))
        assert told(store) == writer.sums
        age(store)
        compact(store)
        assert told(store) == writer.sums
        shutil.rmtree(store.root.parent)


def test_a_second_compactor_that_dies_half_way_while_the_first_one_works() -> None:
    """What it has put into a day that is about to be removed is not removed with it."""
    first, second = (0, GATEWAYS[0], "f", "1", 1), (1, GATEWAYS[1], "f", "1", 2)
    world, writer = local([first])
    compact(world, FIRST + 3 * HOUR)  # into the day, which goes on
    assert levels(world) == {"days": 1}
    both = copy_of(world)
    Writer(both).write([second])
    age(both)
    for number, crash in product(range(operations(copy_of(world), NOW)), range(operations(both, NOW))):
        store, passed = copy_of(world), Counter[str]()
        writer = Writer(store)
        writer.sums["2021-01-30T00", "f", "1"] = 1

        def meanwhile(_: str, store=store, writer=writer, passed=passed, number=number, crash=crash) -> None:  # type: ignore[no-untyped-def]
            if passed.total() == number:
                writer.write([second])
                age(store)
                with suppress(Crash):
                    compact(Watched(store, crash_at(crash)))
            passed["steps"] += 1

        compact(Watched(store, meanwhile))
        assert told(store) == writer.sums
        compact(store)
        assert told(store) == writer.sums
        assert levels(store) == {"months": 1}
        shutil.rmtree(store.root.parent)


KILLED = """
import sys
from pathlib import Path
from usage_worlds import compact, age
from adapters.local_store import LocalStore
store = LocalStore(Path(sys.argv[1]))
print("ready", flush=True)
while compact(store):
    pass
print("done", flush=True)
"""


def test_kill_9_again_and_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "registry")
    writer = Writer(store)
    made = [(hours, gateway, "f", "1", hours + 1) for hours in range(0, 100, 2) for gateway in GATEWAYS]
    writer.write(made)
    age(store)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(Path(__file__).parent)])}
    for number in range(40):
        command = [sys.executable, "-c", KILLED, str(store.root)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(0.02 * number)
            child.send_signal(signal.SIGKILL)
            ended = child.stdout.read()
        assert told(store) == writer.sums
        if "done" in ended:
            break
    compact(store)
    assert levels(store) == {"months": 2}
    assert told(store) == writer.sums


def test_a_year_takes_few_reads(tmp_path: Path) -> None:
    """Of four workers, at the worst time: before the last hour is closed, on the last day of a month."""
    store = LocalStore(tmp_path / "registry")
    first, end = hour_start("2020-01-01T00"), hour_start("2020-12-31T23")
    now = end + 1800
    # The last two hours are open or not closed; of most days a few hours do, for a day is one row of a month.
    hours = [hour for hour in range(first, end + 1, HOUR) if hour > end - 48 * HOUR or hour % (6 * HOUR) == 0]
    for number, hour in enumerate(hours):
        folder = store.root / usage_folder(TENANT) / hour_name(hour)
        folder.mkdir(parents=True)
        for gateway in GATEWAYS:
            path = folder / f"{gateway}-{number}.json"
            path.write_bytes(b'{"functions":{"f":{"1":{"requests":%d}}}}' % (number + 1))
            os.utime(path, (1e9, 1e9))
    compact(store, now)
    assert levels(store) == {"hours": 4, "days": 1, "months": 12}
    assert len(list((store.root / usage_folder(TENANT)).iterdir())) == 3, "no empty folders to walk through"
    reads: list[str] = []
    sheet = sum_usage(Watched(store, reads.append), TENANT, first, end + HOUR, {}, ["hour"])  # type: ignore[arg-type]
    assert len(reads) <= 60
    assert sheet.total.requests == len(GATEWAYS) * sum(range(1, len(hours) + 1))
    assert len(sheet.rows) == len(hours)


def test_a_full_object_gets_a_second_one(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction_module, "MAX_BYTES", 300)
    monkeypatch.setattr(compaction_module, "PAGE", 2)
    writer = Writer(store)
    writer.write([(hours, GATEWAYS[0], f"function-{hours}", "1", hours + 1) for hours in range(24)])
    if isinstance(store, LocalStore):
        age(store)
    compact(store, now_of(store))
    assert levels(store)["months"] > 3
    assert told(store) == writer.sums


def test_what_is_damaged_stays_and_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, writer = local(SOME)
    damaged = usage_key(TENANT, hour_name(FIRST), GATEWAYS[3], 1)
    store.put(damaged, b'{"functions":')
    store.put(usage_folder(TENANT) + "1/other", b"not ours")
    age(store)
    compact(store)
    assert "can't be read" in str(caplog.records[0].__dict__["why"])
    assert levels(store) == {"hours": 3, "months": 2}
    with pytest.raises(StoreUnavailable, match=damaged):
        told(store)
    store.delete(damaged)
    assert told(store) == writer.sums
    store.put(
        month_key(months_folder(TENANT), "2021-01", 1),
        b'{"format":2,"sealed":false,"hours":[],"sources":[],"functions":{}}',
    )
    with pytest.raises(StoreUnavailable, match="newer release"):
        told(store)


@pytest.mark.parametrize("damage", [b"", b'{"format":2,"sealed":false,"hours":[],"sources":[],"functions":{}}'])
def test_a_damaged_day_or_month_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    """Nor hours of its own, which go into another object."""
    store, writer = local(SOME)
    days = [hour_name(FIRST)[:10], hour_name(FIRST + 48 * HOUR)[:10]]
    damaged = [f"{days_folder(TENANT)}{day}-{number:016x}.json" for number, day in enumerate(days)]
    damaged.append(month_key(months_folder(TENANT), days[0][:7], 0))
    for key in damaged:
        store.put(key, damage)
    age(store)
    compact(store)
    compact(store, NOW + HOUR)
    assert levels(store) == {"days": 2, "months": 3}
    for key in damaged:
        assert key in str([record.__dict__.get("why") for record in caplog.records])
        with pytest.raises(StoreUnavailable):
            told(store)
        store.delete(key)
    assert told(store) == writer.sums


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


class Timed(LocalStore):
    """Whose clock the test sets."""

    time = float(NOW)
    broken = ""

    def now(self) -> float:
        self.count()
        return self.time

    def list(self, prefix: str, after: str = "", limit: int = 1000):  # type: ignore[no-untyped-def]
        self.count()
        if self.broken and self.broken in prefix:
            raise StoreUnavailable("on purpose")
        return super().list(prefix, after, limit)

    operations = 0

    def count(self) -> None:
        self.operations += 1


def test_the_job_goes_through_all_tenants_once_per_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction_module, "TENANTS", 2)
    store, clock = Timed(tmp_path / "registry"), Clock()
    for number in range(5):
        key = usage_key(f"t{number}", hour_name(FIRST), GATEWAYS[0], 1)
        store.put(key, b'{"functions":{"f":{"1":{"requests":1}}}}')
        os.utime(store.root / key, (1e9, 1e9))

    def left() -> list[str]:
        return [info.key.split("/")[1] for info in store.list("tenants/") if "/months/" not in info.key]

    async def main() -> None:
        job = UsageCompaction(store, clock)

        def budget(operations: int) -> Turn:
            end = store.operations + operations
            return Turn(1.0, lambda: 0.0, lambda: store.operations < end)

        store.broken = "tenants/t1/"
        with pytest.raises(StoreUnavailable):
            await job.run(turn())
        assert left() == ["t1", "t2", "t3", "t4"]
        turns, ended = 0, False
        while not ended:
            turns += 1
            with suppress(TurnEnded):
                await job.run(budget(6))
                ended = True
        assert turns > 2
        assert left() == ["t1"], "that one waits for the next round"
        store.broken, store.operations = "", 0
        await job.run(turn())
        assert store.operations == 0, "nothing to do until an hour is closed"
        clock.now += HOUR
        store.time += HOUR
        done = turn()
        await job.run(done)
        assert left() == [] and done.work == 2

    asyncio.run(main())
    for number in range(5):
        assert sum_usage(store, f"t{number}", FIRST, NOW, {}, []).total.requests == 1


def test_sheets_add_up() -> None:
    one, two = Sheet(["function"]), Sheet(["function"])
    world, writer = local(SOME)
    for sheet in (one, two):
        sheet.include(sum_usage(world, TENANT, FIRST, NOW, {}, ["function"]))
    one.include(two)
    assert one.total.requests == 2 * writer.sums.total()
    assert [groups["function"] for groups, _ in one.ordered()] == ["f", "g"]
    assert counts(1).maximum(counts(2)).requests == 2


def test_an_hour_is_closed_later_than_gateways_write_to_its_old_name() -> None:
    from gateway.usage.ledger import LATE_SECONDS

    assert LATE_SECONDS < CLOSED_SECONDS
