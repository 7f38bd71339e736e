"""Executes standing policies of functions, which apply without calls: provisioned copies, idle limits, no prefetch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from adapters.choices import Choice
from adapters.functions import Policy
from adapters.slo import CLASSES
from adapters.standing import Entry, Memory, read_standing, settle, stands_in
from adapters.store import ObjectStore
from cluster.news import NodeRecord
from cluster.residency import MAX_WANTED
from gateway.catalog.adapters import adapter_of
from gateway.catalog.functions import Functions
from gateway.catalog.threads import StoreThreads
from gateway.leader.tick import Job, Tick
from gateway.residency.kept_reads import KeptReads
from gateway.residency.lookups import look_up
from gateway.residency.messages import Tier
from gateway.residency.plan import PROVISIONED_SHARE, TENANT_PROVISIONED_SHARE, PrewarmTarget

LOOK_SECONDS = 3.0
"""Seconds between two checks of the policies: the maximum delay of a change."""
SETTLED_SECONDS = 60.0
"""Age, in seconds, from which an entry of standing.json that no policy needs is removed. A younger entry's policy may
still be committed."""

log = logging.getLogger("gateway")


class _PolicyWishes(NamedTuple):
    """Targets of a function's policy."""

    since: float
    policy: Policy
    wishes: list[PrewarmTarget]
    is_settled: bool = True
    """True if the entry in standing.json matches the policy."""


class StandingPolicies:
    """Standing policies, for the leader."""

    def __init__(self, store: ObjectStore, threads: StoreThreads, functions: Functions) -> None:
        self._store, self._threads, self._functions = store, threads, functions
        self._reads = KeptReads("standing policies")
        self.has_read = False
        """True once the policies were read. Until then it is unknown which adapters nodes must keep."""
        self.wishes: list[PrewarmTarget] = []
        """Provisioned copies as of the last check, most important first; unchanged while the registry is
        unavailable."""
        self.idle_ttls: Mapping[str, float] = {}
        """Idle limits in seconds, by digest: the longest of the functions that share an adapter."""
        self.not_prefetched: frozenset[str] = frozenset()
        """Functions (`tenant/name`) whose adapters are not loaded because of forecasts."""

    def job(self) -> Job:
        return Job("standing", self.check, LOOK_SECONDS, "nodes")

    async def check(self, tick: Tick) -> None:
        await self._reads.renew(self._check(tick))
        self.has_read = True

    async def _check(self, tick: Tick) -> None:
        standing = await self._threads.read(read_standing, self._store)
        entries = standing.functions
        policies, idle, stale, not_prefetched = list[_PolicyWishes](), dict[str, float](), list[str](), set[str]()
        async for key, choices in look_up(self._functions, list(entries), tick):
            entry = entries[key]
            policy = _wishes_of(key, entry, choices)
            if policy is None or not policy.is_settled:
                stale.append(key)
            if policy is None:
                continue
            policies.append(policy)
            if policy.policy.prefetch == "off":
                not_prefetched.add(key)
            for digest in entry.digests if entry.idle_ttl is not None else ():
                idle[digest] = max(idle.get(digest, 0.0), entry.idle_ttl or 0.0)
        self.wishes, self.idle_ttls, self.not_prefetched = _in_order(policies), idle, frozenset(not_prefetched)
        tick.work += len(self.wishes)
        for key in stale:
            tick.check()
            await self._threads.write(_settle_old, self._store, key, entries[key])


def _wishes_of(key: str, entry: Entry, choices: Sequence[Choice] | None) -> _PolicyWishes | None:
    """Returns the targets of a function's policy; None if the function is gone or has no standing policy."""
    if choices is None:
        return None
    if not choices:
        return _PolicyWishes(entry.since, Policy(), [])
    policy = choices[0].version.policy
    if not stands_in(policy):
        return None
    adapters = [adapter_of(choice.version) for choice in choices if choice.is_whole]
    copies = policy.provisioned
    tiers: list[tuple[Tier, int]] = []
    if copies is not None:
        tiers = [("device", copies.device), ("host", copies.host)]
    wishes = [
        PrewarmTarget(key, adapter, "provisioned", 1.0, tier, copies=count)
        for adapter in adapters
        for tier, count in tiers
        if count
    ]
    return _PolicyWishes(entry.since, policy, wishes, entry.matches(policy))


def memory_of(records: Iterable[NodeRecord], base: str) -> Memory:
    """Returns the memory for provisioned copies on nodes that serve the base or are starting.

    Starting nodes do not report yet what they serve and have. The memory is unknown while there are no such nodes.
    """
    nodes = [record for record in records if record.state != "draining" and record.base in (base, "")]
    if not nodes:
        return Memory()
    device, host = ([getattr(node, name) for node in nodes] for name in ("adapter_bytes", "host_bytes"))
    return Memory(
        nodes=len(nodes),
        device=PROVISIONED_SHARE * sum(device) if all(device) else None,
        host=PROVISIONED_SHARE * sum(host) if all(host) else None,
        tenant_share=TENANT_PROVISIONED_SHARE,
        copies=MAX_WANTED * len(nodes),
        itemsize=max(node.adapter_itemsize for node in nodes),
    )


def _in_order(policies: list[_PolicyWishes]) -> list[PrewarmTarget]:
    """Returns the targets, those on devices before those in host memory.

    Within a tier the highest SLO class comes first, then the oldest policy.
    """
    ordered = sorted(policies, key=lambda each: (-CLASSES.index(each.policy.slo_class or "standard"), each.since))
    wishes = [wish for each in ordered for wish in each.wishes]
    return sorted(wishes, key=lambda wish: wish.tier != "device")


def _settle_old(store: ObjectStore, key: str, entry: Entry) -> None:
    """Removes an entry that no policy asks for, once it is SETTLED_SECONDS old. Blocks."""
    if store.now() - entry.since >= SETTLED_SECONDS:
        tenant, _, name = key.partition("/")
        settle(store, tenant, name)
