"""Meters the GB-seconds of adapters in nodes' memory, by tier, for the functions that own them.

Provisioned copies are counted separately. Every METER_SECONDS the leader reads what nodes hold and counts each adapter
for the time since its last reading. Nodes know digests only, so the leader learns the owners from calls and policies.
An adapter of several functions is counted in equal parts. An adapter that no call or policy has named since this worker
became leader is not counted.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping

from adapters.errors import CorruptRecord, NotFound, StoreUnavailable
from adapters.registry import Registry
from cluster.news import Resident
from cluster.state import ClusterState
from gateway.catalog.threads import StoreThreads
from gateway.leader.tick import Job, Tick
from gateway.usage.counts import UsageCounts

METER_SECONDS = 10.0
MAX_GAP_S = 60.0
"""Maximum seconds between two readings for which adapters are counted. In a longer time another worker may have led and
counted them."""
MAX_DIGESTS = 40_000
"""Maximum digests whose owners are remembered; the least recently named digest is forgotten."""
MAX_OWNERS_PER_ADAPTER = 16
MAX_LOOKUPS_A_TICK = 32
GB = 1e9
TIERS = ("device", "host")
TOGETHER = 256
"""Number of counts made between two pauses that let the event loop run."""

Owner = tuple[str, str]
Count = Callable[[str, str, str, UsageCounts], None]


class Owners:
    """Owners of each adapter: the functions with a version that uses it."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, dict[Owner, str | None]] = OrderedDict()
        """Owners of each digest, with the owner's version that uses it; None if this version is not known yet."""
        self._digests: dict[Owner, set[str]] = {}
        self.unknown: dict[Owner, None] = {}
        """Owners whose versions are to be looked up, oldest first."""

    def record(self, tenant: str, function: str, digest: str) -> None:
        """Records that a call or a policy of the function named the adapter."""
        owners, owner = self._owners.setdefault(digest, {}), (tenant, function)
        self._owners.move_to_end(digest)
        if owner not in owners and len(owners) < MAX_OWNERS_PER_ADAPTER:
            owners[owner] = None
            self._digests.setdefault(owner, set()).add(digest)
            self.unknown[owner] = None
        if len(self._owners) > MAX_DIGESTS:
            oldest, lost = self._owners.popitem(last=False)
            for each in lost:
                self._remove(each, oldest)

    def forget(self, tenant: str, function: str) -> None:
        """Schedules a new lookup of a changed function, which may have lost versions."""
        if (tenant, function) in self._digests:
            self.unknown[tenant, function] = None

    def learn(self, owner: Owner, versions: Mapping[str, str]) -> None:
        """Sets the function's versions by digest. It stops owning other adapters."""
        self.unknown.pop(owner, None)
        for digest in list(self._digests.get(owner, ())):
            if digest in versions:
                self._owners[digest][owner] = versions[digest]
            else:
                self._owners[digest].pop(owner, None)
                self._remove(owner, digest)

    def of(self, digest: str) -> list[tuple[Owner, str]]:
        """Returns the adapter's owners with their versions, where these are known."""
        owners = self._owners.get(digest, {})
        return [(owner, version) for owner, version in owners.items() if version is not None]

    def _remove(self, owner: Owner, digest: str) -> None:
        digests = self._digests.get(owner, set())
        digests.discard(digest)
        if not digests:
            self._digests.pop(owner, None)
            self.unknown.pop(owner, None)


class ResidentMeter:
    """Leader's meter of adapters in memory.

    `pinned` returns, by node id and digest, the tier in which an adapter is provisioned. `count`: the ledger's `add`.
    `clock`: monotonic seconds.
    """

    def __init__(
        self,
        cluster: ClusterState,
        registry: Registry,
        threads: StoreThreads,
        owners: Owners,
        *,
        pinned: Callable[[], Mapping[str, Mapping[str, str]]],
        count: Count,
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._registry, self._threads, self._owners = cluster, registry, threads, owners
        self._pinned, self._count, self._clock = pinned, count, clock
        self._read_at = -math.inf

    def job(self) -> Job:
        return Job("residents", self.measure, METER_SECONDS, "nodes")

    async def measure(self, tick: Tick) -> None:
        """Reads which adapters nodes hold, and counts each for the time since the last reading."""
        for owner in list(self._owners.unknown)[:MAX_LOOKUPS_A_TICK]:
            tick.check()
            await self._learn(owner)
        tick.check()
        now, before = self._clock(), self._read_at
        self._read_at = now
        if now - before > MAX_GAP_S or before < tick.since:
            return
        sums = await self._sums(now - before)
        for number, ((owner, version), counts) in enumerate(sums.items()):
            if number % TOGETHER == TOGETHER - 1:
                await asyncio.sleep(0)
            self._count(*owner, version, counts)
            tick.work += 1

    async def _learn(self, owner: Owner) -> None:
        """Looks up the versions of the owner's function, and stores them. Does nothing while the registry is
        unavailable."""
        try:
            record = await self._threads.read(self._registry.function, *owner)
        except (StoreUnavailable, CorruptRecord):
            return
        except NotFound:
            self._owners.learn(owner, {})
        else:
            self._owners.learn(owner, {entry.digest: str(entry.version) for entry in record.versions})

    async def _sums(self, seconds: float) -> dict[tuple[Owner, str], UsageCounts]:
        """Returns the usage of `seconds` seconds of what nodes hold now, by owner and version."""
        table, pinned = await self._cluster.table(), self._pinned()
        sums: dict[tuple[Owner, str], UsageCounts] = {}
        for row in list(table.rows()):
            await asyncio.sleep(0)
            for resident in list(table.residents(row).values()) if table.live[row] else ():
                pinned_tier = pinned.get(table.ids[row] or "", {}).get(resident.digest)
                owners = self._owners.of(resident.digest) if resident.tier in TIERS else []
                for owner in owners:
                    part = _counted(resident, pinned_tier == resident.tier, seconds / len(owners))
                    sums.setdefault(owner, UsageCounts()).add(part)
        return sums


def _counted(resident: Resident, pinned: bool, seconds: float) -> UsageCounts:
    amount = resident.bytes / GB * seconds
    if resident.tier == "device":
        return UsageCounts(device_pinned_gb_seconds=amount) if pinned else UsageCounts(device_gb_seconds=amount)
    return UsageCounts(host_pinned_gb_seconds=amount) if pinned else UsageCounts(host_gb_seconds=amount)
