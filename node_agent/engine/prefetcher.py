"""Follows the gateway's hints for this node: predicted prefetches, and provisioned copies, which stay.

Calls have precedence. A predicted prefetch starts only while no request's load is running or pending. It stalls when
one starts (node_agent.adapter_memory.loader_threads), and a request may take its room. It evicts only adapters that are
less likely to be called (`SparedAdapters`).

A provisioned copy is loaded to its tier with the priority of a request and is pinned, so that a flood of other calls
neither delays nor evicts it. If the hint names a higher tier than the policy, the load to that tier is a predicted
prefetch.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from msgspec.structs import replace

from cluster.residency import WantedAdapter, WantedResidency, WantedTier
from node_agent.adapter_memory.priority import Priority
from node_agent.engine.adapter_tiers import AdapterTiers, is_staged
from node_agent.engine.idle_limits import IdleLimits
from node_agent.engine.prefetch_load import PrefetchLoad
from node_agent.engine.prefetch_record import MAX_AT_ONCE, Bounds, PrefetchRecord
from node_agent.leases import LoadFailed, TooLarge

MAX_HINT_S = 600.0
"""Maximum seconds for which the gateway's hints are valid."""
LOOK_INTERVAL_S = 0.1
"""Seconds between two checks for prefetches to start, and for the outcomes of earlier ones."""
UNUSED_S = 300.0
"""Seconds after which a prefetched adapter that was not called and has no hint counts as wasted."""
HYSTERESIS = 2.0
"""Factor by which an adapter's call probability must exceed that of another one to evict it. Probabilities come from
the gateway, or from past calls."""
FULL_REST_S = 10.0
"""Seconds before the next attempt for an adapter that found no room in a tier."""
PROVISIONED_REST_S = 1.0
"""Seconds before the next attempt for a provisioned copy; it finds room as requests end."""
FAILED_REST_S = 60.0
"""Seconds before the next attempt after a failed load or an operator's eviction."""
TIERS: tuple[WantedTier, ...] = ("device", "host")
LEEWAY = 8
"""Divisor: the bytes of 1/8 of the device's adapter memory may be wasted without effect (`leeway` of
PrefetchRecord)."""

log = logging.getLogger("garnish.engine")


@dataclass(eq=False)
class _Underway:
    """Prefetch in progress."""

    want: WantedAdapter
    load: PrefetchLoad
    tier: WantedTier
    is_kept: bool
    progress: float = 0.0
    """share of the load that was finished at the last check, 0 to 1"""


@dataclass(frozen=True)
class _Prefetched:
    """Size and load time of a prefetched adapter that no request has used yet."""

    bytes: int
    at: float


class Prefetcher:
    """Prefetches by the gateway's hints. Only the engine's thread calls it."""

    def __init__(self, tiers: AdapterTiers, waste: float | None) -> None:
        """`waste`: wasted share of prefetched bytes above which prefetching slows down; None: only provisioned copies
        are loaded."""
        self._tiers, self._enabled = tiers, waste is not None
        self.record = PrefetchRecord(waste or 0.0, tiers.adapter_memory // LEEWAY)
        self._idle_limits = IdleLimits(tiers, self.wants)
        self._wants: dict[str, WantedAdapter] = {}
        """hints by digest, in order of importance"""
        self._until = 0.0
        self._underway: dict[str, _Underway] = {}
        self._prefetched: dict[str, _Prefetched] = {}
        self._rests: dict[tuple[str, WantedTier], float] = {}
        """time, in monotonic seconds, before which an adapter is not loaded again, by (digest, tier)"""
        self._look_at = 0.0

    @property
    def underway(self) -> int:
        """Returns the number of prefetches in progress."""
        return len(self._underway)

    def want(self, residency: WantedResidency) -> None:
        """Replaces the hints and the idle limits."""
        self._until = time.monotonic() + min(residency.seconds, MAX_HINT_S)
        wants: dict[str, WantedAdapter] = {}
        for want in residency.adapters:
            if self._enabled:
                wants.setdefault(want.adapter.digest, want)
            elif want.provisioned is not None:
                wants.setdefault(want.adapter.digest, replace(want, tier=want.provisioned))
        self._replace_wants(wants)
        self._idle_limits.set(residency)

    def wants(self, digest: str) -> bool:
        """Returns whether the gateway currently hints at the adapter."""
        return digest in self._wants

    def clear(self) -> None:
        """Removes all hints and idle limits."""
        self._idle_limits.clear()
        if self._wants:
            self._replace_wants({})

    def cancel(self, digest: str) -> None:
        """Ends the adapter's prefetch because an operator evicts it, and blocks new ones for FAILED_REST_S."""
        self._rest(digest, FAILED_REST_S)
        self._drop(digest)
        self._prefetched.pop(digest, None)

    def record_call(self, digest: str) -> None:
        """Records a request for the adapter, which takes over a running prefetch. The request must already wait for the
        adapter (AdapterTiers.announce)."""
        now = time.monotonic()
        each, prefetched = self._underway.pop(digest, None), self._prefetched.pop(digest, None)
        if each is not None:
            size, progress, waits = each.want.adapter.bytes, each.load.progress, each.load.waits
            each.load.end()
            if not each.want.pinned:
                self.record.count_bytes(now, useful=size * progress, late=size * (1 - progress) if waits else 0)
        if prefetched is not None:
            self.record.count_bytes(now, useful=prefetched.bytes)

    def poll(self) -> None:
        """Advances prefetches, records outcomes of earlier ones, and starts new ones if no other load is pending."""
        now = time.monotonic()
        if self._wants and now >= self._until:
            self.clear()
        may_place = bool(self._underway) and not self._tiers.urgent_loads
        for each in list(self._underway.values()):
            self._advance(each, may_place or each.is_kept)
        if now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL_S
            self._end_rests(now)
            self._judge(now)
            self._begin(now)
        self._idle_limits.poll()

    def may_go(self, digest: str, target: str) -> bool:
        """Returns whether the idle adapter `digest` may be evicted to load `target`, which must be more likely to be
        called."""
        want, candidate = self._wants.get(target), self._wants.get(digest)
        if want is None or self._tiers.hosts.waiting(digest):
            return False
        if self._is_kept(want):
            return candidate is None or candidate.provisioned is None
        if candidate is not None:
            return not candidate.pinned and candidate.chance * HYSTERESIS <= _chance(want)
        return self._tiers.demand.chance(digest, time.monotonic()) * HYSTERESIS <= _chance(want)

    # --- inside

    def _replace_wants(self, wants: dict[str, WantedAdapter]) -> None:
        self._wants = wants
        self._tiers.expect({digest: _chance(want) for digest, want in wants.items()})
        provisioned = {digest: want.provisioned for digest, want in wants.items()}
        self._tiers.pin(*([d for d, tier in provisioned.items() if tier == pinned] for pinned in ("device", "host")))
        for digest, each in list(self._underway.items()):
            want = wants.get(digest)
            if want is None or self._is_kept(want) != each.is_kept:
                self._drop(digest)  # the provisioned state changed, so it is loaded again at another priority
            else:
                each.want = want

    def _drop(self, digest: str) -> None:
        """Ends a prefetch. Its bytes count as wasted, unless its load was complete and so may still serve a call."""
        each = self._underway.pop(digest, None)
        if each is None:
            return
        progress = each.load.progress
        each.load.end()
        if progress == 1:
            self._record_prefetched(each)
        else:
            self._waste(each, progress)

    def _waste(self, each: _Underway, share: float) -> None:
        if not each.want.pinned:
            self.record.count_bytes(time.monotonic(), wasted=each.want.adapter.bytes * share)

    def _record_prefetched(self, each: _Underway) -> None:
        if not each.want.pinned:
            self._prefetched[each.want.adapter.digest] = _Prefetched(each.want.adapter.bytes, time.monotonic())

    def _advance(self, each: _Underway, may_place: bool) -> None:
        adapter, progress = each.want.adapter, each.load.progress
        if progress < each.progress:  # a request took its room, and it started again
            self._waste(each, each.progress)
        each.progress = progress
        if self._tiers.hosts.lacks_room(adapter.digest):
            self._drop(adapter.digest)  # other prefetches may find room
            self._rest(adapter.digest, _full_rest(each))
            return
        outcome = each.load.advance(may_place)
        if outcome is None:
            return
        del self._underway[adapter.digest]
        if each.is_kept:
            self._look_at = (
                0.0  # start the next copy at once: small ones would leave the link idle until the next check
            )
        if isinstance(outcome, (TooLarge, LoadFailed)):
            log.warning("a predicted prefetch failed", extra={"digest": adapter.digest, "reason": str(outcome)})
            self._waste(each, each.progress)
            self._rest(adapter.digest, FAILED_REST_S)
            return
        if outcome == "host":  # the device has no room, or would evict it again at once
            self._rest(adapter.digest, _full_rest(each), each.tier)
        if outcome == "device" or not each.load.was_staged:
            self._record_prefetched(each)

    def _judge(self, now: float) -> None:
        for digest, prefetched in list(self._prefetched.items()):
            is_here = self._tiers.on_device(digest) or is_staged(self._tiers, digest)
            if is_here and (digest in self._wants or now - prefetched.at < UNUSED_S):
                continue
            del self._prefetched[digest]
            self.record.count_bytes(now, wasted=prefetched.bytes)

    def _begin(self, now: float) -> None:
        if not self._wants:
            return
        bounds, steps_back = self.record.bounds(now), self._tiers.urgent_loads
        for digest, want in self._wants.items():
            is_kept = self._is_kept(want)
            tier = want.provisioned if is_kept and want.provisioned is not None else want.tier
            if steps_back and not is_kept:
                continue
            if [each.is_kept for each in self._underway.values()].count(is_kept) >= MAX_AT_ONCE:
                continue
            if digest in self._underway or (digest, tier) in self._rests or self._tiers.hosts.waiting(digest):
                continue
            if self._is_held_back(want, bounds) or self._is_there(want):
                continue
            load = PrefetchLoad(
                self._tiers,
                want.adapter,
                Priority.REQUEST if is_kept else Priority.PREDICTED,
                to_device=tier == "device",
                spared=SparedAdapters(self, digest),
            )
            self._underway[digest] = _Underway(want, load, tier, is_kept)

    def _is_kept(self, want: WantedAdapter) -> bool:
        """Returns whether a load for this hint is one of its provisioned copy, and not a predicted prefetch."""
        return want.provisioned == "device" or (
            want.provisioned == "host" and not is_staged(self._tiers, want.adapter.digest)
        )

    def _is_held_back(self, want: WantedAdapter, bounds: Bounds) -> bool:
        if want.pinned and not _is_above_its_tier(want):
            return False
        return len(self._underway) >= bounds.at_once or want.chance < bounds.min_chance

    def _is_there(self, want: WantedAdapter) -> bool:
        """Returns whether the adapter is in the hint's tier or a higher one. Also returns True if it already has room
        on the device."""
        if self._tiers.on_device(want.adapter.digest):
            return True
        return want.tier == "host" and is_staged(self._tiers, want.adapter.digest)

    def _rest(self, digest: str, seconds: float, *tiers: WantedTier) -> None:
        """Blocks loads of the adapter to these tiers for `seconds`; to all tiers if none is given."""
        self._rests |= dict.fromkeys(((digest, tier) for tier in tiers or TIERS), time.monotonic() + seconds)

    def _end_rests(self, now: float) -> None:
        self._rests = {place: until for place, until in self._rests.items() if until > now}


class SparedAdapters:
    """Container of digests: adapters that must not be evicted for a prefetch of `target`."""

    def __init__(self, prefetcher: Prefetcher, target: str) -> None:
        self._prefetcher, self._target = prefetcher, target

    def __contains__(self, digest: object) -> bool:
        return not self._prefetcher.may_go(str(digest), self._target)


def _full_rest(each: _Underway) -> float:
    return PROVISIONED_REST_S if each.is_kept else FULL_REST_S


def _is_above_its_tier(want: WantedAdapter) -> bool:
    """Returns whether the hint asks for the device in addition to a copy provisioned in host memory."""
    return (want.provisioned, want.tier) == ("host", "device")


def _chance(want: WantedAdapter) -> float:
    return 1.0 if want.pinned and not _is_above_its_tier(want) else want.chance
