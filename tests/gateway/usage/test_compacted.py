"""What compaction leaves in a store and reads: full and damaged objects, a year, all tenants in tick."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
from usage_worlds import (
    FIRST,
    GATEWAYS,
    NOW,
    SOME,
    TENANT,
    Watched,
    Writer,
    age,
    compact,
    counts,
    levels,
    local,
    now_of,
    tick,
    told,
)

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.store import ObjectStore
from gateway.leader.tick import Tick, TickEnded
from gateway.usage import compaction as compaction_module
from gateway.usage.compaction import CLOSED_SECONDS, UsageCompaction
from gateway.usage.hours import HOUR, hour_name, hour_start
from gateway.usage.objects import days_folder, month_key, months_folder, usage_folder, usage_key
from gateway.usage.report import Sheet, sum_usage

pytestmark = pytest.mark.usefixtures("worlds_end_with_the_test", "one_reader")


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

        def budget(operations: int) -> Tick:
            end = store.operations + operations
            return Tick(1.0, lambda: 0.0, lambda: store.operations < end)

        store.broken = "tenants/t1/"
        with pytest.raises(StoreUnavailable):
            await job.run(tick())
        assert left() == ["t1", "t2", "t3", "t4"]
        ticks, ended = 0, False
        while not ended:
            ticks += 1
            with suppress(TickEnded):
                await job.run(budget(6))
                ended = True
        assert ticks > 2
        assert left() == ["t1"], "that one waits for the next round"
        store.broken, store.operations = "", 0
        await job.run(tick())
        assert store.operations == 0, "nothing to do until an hour is closed"
        clock.now += HOUR
        store.time += HOUR
        done = tick()
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
