"""GB-seconds of adapters in memory, and what usage costs, against sums of what was drawn."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from scheduling_world import node, table_of

from adapters.errors import NoSuchFunction, StoreUnavailable
from adapters.functions import FunctionRecord, VersionEntry
from cluster.news import Resident
from gateway.leader.tick import Tick
from gateway.prices import Prices
from gateway.usage import residents
from gateway.usage.cells import Cell
from gateway.usage.counts import UsageCounts, cost_of
from gateway.usage.objects import MergedRecord, decode_merged, encode_merged
from gateway.usage.residents import GB, MAX_GAP_S, Owners, ResidentMeter

DIGESTS = [f"{number:064x}" for number in range(9)]
FIELDS = UsageCounts.__struct_fields__


class World:
    """A cluster, a registry and a ledger of its own; a clock that a test moves."""

    def __init__(self) -> None:
        self.now, self.away = 1000.0, False
        self.held: dict[str, list[Resident]] = {"n0": [], "n1": []}
        self.pinned: dict[str, dict[str, str]] = {}
        self.versions: dict[tuple[str, str], list[str]] = {}
        self.counted: dict[tuple[str, str, str], UsageCounts] = defaultdict(UsageCounts)
        self.owners = Owners()
        self.meter = ResidentMeter(
            SimpleNamespace(table=self._table),  # type: ignore[arg-type]
            SimpleNamespace(function=self._function),  # type: ignore[arg-type]
            SimpleNamespace(read=self._read),  # type: ignore[arg-type]
            self.owners,
            pinned=lambda: self.pinned,
            count=lambda tenant, function, version, counts: self.counted[tenant, function, version].add(counts),
            clock=lambda: self.now,
        )

    async def _table(self) -> Any:
        return table_of(*(node(name, residents=held) for name, held in self.held.items()))

    async def _read(self, call: Any, *args: str) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return call(*args)

    def _function(self, tenant: str, name: str) -> FunctionRecord:
        if (tenant, name) not in self.versions:
            raise NoSuchFunction(tenant, name)
        digests = self.versions[tenant, name]
        entries = [VersionEntry(n + 1, digest, "b", (), (), 1, 1.0, 2) for n, digest in enumerate(digests)]
        return FunctionRecord(name, 1.0, versions=tuple(entries))

    def look(self, seconds: float = 0.0, since: float = -math.inf) -> None:
        """`since`: when this worker began to lead."""
        self.now += seconds
        asyncio.run(self.meter.measure(Tick(math.inf, lambda: 0.0, lambda: True, since)))


@pytest.mark.parametrize("seed", range(3))
def test_each_adapter_counts_for_its_owners_as_long_as_it_is_there(seed: int) -> None:
    """Drawn residents, tiers, pins and owners; shared adapters in equal parts."""
    rng, world = random.Random(seed), World()
    functions = [("t", "f"), ("t", "g"), ("u", "f")]
    owned: dict[str, list[tuple[str, str]]] = {}
    for digest in DIGESTS[:8]:
        owned[digest] = rng.sample(functions, rng.randint(0, 2))
        for owner in owned[digest]:
            world.versions.setdefault(owner, []).append(digest)
            world.owners.record(*owner, digest)
    expected: dict[tuple[str, str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    world.look()
    for _ in range(20):
        seconds = rng.uniform(1, 20)
        for name in world.held:
            some = rng.sample(DIGESTS[:8], 4)
            world.held[name] = [
                Resident(d, rng.choice(["device", "host", "disk"]), rng.randrange(10**6, 10**9), 0) for d in some
            ]
            world.pinned[name] = {d: rng.choice(["device", "host"]) for d in rng.sample(DIGESTS[:8], 3)}
            for held in world.held[name]:
                if held.tier == "disk":
                    continue
                pinned = "pinned_" if world.pinned[name].get(held.digest) == held.tier else ""
                for owner in owned[held.digest]:
                    version = str(world.versions[owner].index(held.digest) + 1)
                    amount = held.bytes / 1e9 * seconds / len(owned[held.digest])
                    expected[(*owner, version)][f"{held.tier}_{pinned}gb_seconds"] += amount
        world.look(seconds)
    assert world.counted.keys() == expected.keys()
    for key, sums in expected.items():
        counted = {name: value for name, value in msgspec.structs.asdict(world.counted[key]).items() if value}
        assert counted == pytest.approx(dict(sums))


def test_who_did_not_lead_meanwhile_counts_nothing_for_it() -> None:
    world = World()
    world.versions["t", "f"] = [DIGESTS[0]]
    world.owners.record("t", "f", DIGESTS[0])
    world.held["n0"] = [Resident(DIGESTS[0], "device", int(GB), 0)]
    world.look()
    world.look(MAX_GAP_S + 1)
    assert not world.counted
    world.look(5)
    assert world.counted["t", "f", "1"].device_gb_seconds == pytest.approx(5)
    began = world.now + 20  # another worker has led until then
    world.look(30, began)
    assert world.counted["t", "f", "1"].device_gb_seconds == pytest.approx(5)
    world.look(7, began)
    assert world.counted["t", "f", "1"].device_gb_seconds == pytest.approx(12)


def test_versions_are_looked_up_once_and_again_after_a_change() -> None:
    world = World()
    world.versions["t", "f"] = [DIGESTS[0]]
    world.held["n0"] = [Resident(DIGESTS[0], "host", int(GB), 0)]
    world.owners.record("t", "f", DIGESTS[0])
    world.away = True
    world.look()
    world.look(1)
    assert not world.counted, "whose it is, nobody knows yet"
    world.away = False
    world.look(1)
    world.away = True
    world.look(1)
    assert world.counted["t", "f", "1"].host_gb_seconds == pytest.approx(2)
    del world.versions["t", "f"]
    world.owners.forget("t", "f")
    world.owners.forget("u", "nobody")
    world.away = False
    world.look(1)
    assert world.counted["t", "f", "1"].host_gb_seconds == pytest.approx(2), "the function is gone"
    assert (world.owners.unknown, world.owners.of(DIGESTS[0])) == ({}, [])


def test_owners_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "MAX_DIGESTS", 3)
    owners = Owners()
    for number in range(5):
        owners.record("t", f"f{number}", DIGESTS[number])
    assert list(owners.unknown) == [("t", "f2"), ("t", "f3"), ("t", "f4")]
    for number in range(40):
        owners.record("t", f"g{number}", DIGESTS[4])
    assert len(owners.unknown) == 2 + residents.MAX_OWNERS_PER_ADAPTER


# --- counters


def test_merged_objects_hold_all_counters() -> None:
    counts = UsageCounts(*range(1, len(FIELDS) + 1))
    cell = Cell("2026-11-21T17", "0123456789abcdef-1", "f", "1")
    assert decode_merged("key", encode_merged({cell: counts})) == ({cell: counts}, False)
    assert msgspec.json.decode(encode_merged({cell: counts}), type=MergedRecord).format == 1


def test_counters_are_added_and_joined_each_by_itself() -> None:
    rng = random.Random(2)
    one, other = ([float(rng.randrange(99)) for _ in FIELDS] for _ in range(2))
    joined = UsageCounts(*one).maximum(UsageCounts(*other))
    assert msgspec.structs.astuple(joined) == tuple(map(max, one, other))
    added = UsageCounts(*one)
    added.add(UsageCounts(*other))
    assert msgspec.structs.astuple(added) == tuple(map(sum, zip(one, other, strict=True)))


def test_costs_are_sums_of_prices() -> None:
    counts = UsageCounts(3, 2_000_000, 500_000, 1, 90.0, 1800.0, 3600.0, 900.0, 900.0)
    prices = Prices(input_tokens_1m=0.5, output_tokens_1m=2.0, device_second=0.01, adapter_gb_hour=0.1)
    assert cost_of(counts, prices) == pytest.approx(1.0 + 1.0 + 0.9 + 0.2)
    assert cost_of(counts, Prices()) == 0.0
    assert cost_of(counts, Prices(device_second=0.02)) == pytest.approx(1.8)
