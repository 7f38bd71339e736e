"""Decides which waiting requests enter the batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from cluster.messages import Adapter
from node_agent.engine.adapter_tiers import AdapterTiers
from node_agent.engine.preemption import OverShare, choose_lenders, choose_victims
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.request import Request
from node_agent.engine.reserves import AWAITED_SECONDS, Reserves, Room
from node_agent.engine.waiting import WaitingQueue
from node_agent.leases import Lease, LoadFailed, NoRoom, Pending, TooLarge


@dataclass(frozen=True)
class Refused:
    """Request that can never run on this node, with the reason."""

    request: Request
    type: str
    message: str
    cause: str = ""
    damaged: bool = False


STARVED_AFTER = 1.0
"""Seconds after which a request that waits for adapter memory blocks all later requests with an adapter."""


@dataclass
class _Shortage:
    """Shortage of adapter memory."""

    is_short: bool = False
    is_starved: bool = False
    """whether a request has waited for STARVED_AFTER seconds"""


class Admission:
    """Admits waiting requests in fair-share order, within free rows, KV blocks, adapter memory and `reserves`.

    A request reserves KV blocks for its whole length, so an admitted request always completes. Cached prefix blocks
    that others also use need not be free. Exceptions to the order:

    - While a strict request waits for rows or KV blocks, no best-effort request enters: it would be preempted at
      once.
    - Requests whose adapter is not on the device yet hold at most a quarter of the rows and, except for the first
      of them, half of the KV blocks. Further ones are passed over and keep loading. Best-effort requests do not
      count against others. Strict requests may also use their reserve.
    - A request that is not best effort and finds no adapter memory may take that of adapters used only by
      best-effort requests. A best-effort request evicts no adapter that others called within AWAITED_SECONDS.
      Exceptions: these adapters have more than half of the memory, leave its adapter no room, or it has itself
      waited for room that long.
    - A request that waits for adapter memory is passed only by requests that need no new room: otherwise small
      adapters could block a large one forever. After STARVED_AFTER no request with an adapter passes it: otherwise
      adapters in steady use could block it. A waiting best-effort request blocks only other best-effort requests in
      this way.
    - A request that waits for rows or KV blocks is passed only by strict requests, which use their reserve and
      places of preempted best-effort requests (`preempt`). They therefore cannot block others forever. If its
      tenant has much waiting, light tenants (`Reserves.light`) may also pass it, using the reserve for them.
    - The first request of a tenant that was idle may find nothing reserved. It then takes a place from tenants with
      more than an equal share of rows or KV blocks, up to its own share, by preemption.
    """

    def __init__(
        self,
        running: list[Request],
        max_rows: int,
        prefixes: Prefixes,
        store: AdapterTiers,
        reserves: Reserves,
        preempt: Callable[[Request], None],
    ) -> None:
        self.blocks, self.store, self.reserves, self._preempt = prefixes.blocks, store, reserves, preempt
        self._prefixes = prefixes
        self._running = list(running)
        self.free_rows = max_rows - len(running)
        self._loading = [r for r in running if r.lease is not None and not store.loaded(r.lease)]
        self._max_loading = max(1, max_rows // 4)
        self._shortage = _Shortage()
        """shortage of adapter memory found by requests that are not best effort"""
        self._best_effort_shortage = _Shortage()
        self._passed = False
        """whether a request waits for rows or blocks. Others may then pass it only if they use reserved ones."""
        self._by_light = False
        """whether light tenants (`Reserves.light`) may pass that request, and not only strict requests"""
        self.short = False
        """whether any request waits for rows or blocks"""
        self.admitted: list[Request] = []
        self.refused: list[Refused] = []

    def look_at(self, queue: WaitingQueue) -> None:
        """Admits or refuses waiting requests, and removes these from `queue`."""
        _book_waits_for_bytes(queue)
        if queue.strict and not self._walk(queue, best_effort=False):
            self.short = True
            return
        if self.free_rows > 0 or any(map(self.reserves.may_claim, queue)):
            self._walk(queue, best_effort=True)
        self.short = self._passed or (len(queue) > 0 and self.free_rows <= 0)

    def _walk(self, queue: WaitingQueue, best_effort: bool) -> bool:
        """Visits the waiting requests once, in order, and admits or refuses them. `best_effort` False skips best-effort
        requests. Returns False if a strict request waits for rows or blocks, so that no other request may pass it."""
        for request in queue.in_order():
            if request.slo_class == "strict":
                if not self._try_strict(request, queue):
                    return False
            elif request.slo_class == "best_effort" and not best_effort:
                continue
            elif not self._passed:
                if not self._try(request, queue):
                    self._passed = True
                    self._by_light = not self.reserves.light(request.tenant) and self._light_wait(queue)
            elif self._by_light and self.reserves.light(request.tenant):
                self._try(request, queue, self.reserves.max_blocks)  # from the reserve for light tenants
            if self._passed and not queue.strict and not self._by_light:
                break
        return True

    def _try_strict(self, request: Request, queue: WaitingQueue) -> bool:
        """Admits a strict request if possible. Returns False if it waits for rows or blocks."""
        need, room = self._need(request), Room(self.free_rows, self.blocks.free)
        if self._passed:
            reserved = self.reserves.for_strict()
            room = Room(min(room.rows, reserved.rows), min(room.blocks, reserved.blocks))
        if room.rows > 0 and room.blocks >= need:
            return self._enter(request, need, queue)
        cached = self._prefixes.find(request)
        short = Room(1 - room.rows, need - self.blocks.in_use(cached) - room.blocks)
        victims = choose_victims(self._running, short, self.blocks, set(cached))
        return victims is not None and self._enter(request, need, queue, victims)

    def _light_wait(self, queue: WaitingQueue) -> bool:
        """Returns whether a waiting tenant may use the rows and blocks reserved for light tenants, or may take them
        from other tenants."""
        if self.free_rows > 0 and any(map(self.reserves.light, queue.tenants)):
            return True
        return any(map(self.reserves.may_claim, queue))

    def _try(self, request: Request, queue: WaitingQueue, max_blocks: float = math.inf) -> bool:
        """Admits the request if possible, using at most `max_blocks` free blocks. Returns False if it waits for rows or
        blocks."""
        need, reserved = self._need(request), self.reserves.kept_from(request)
        has_row, claims = self.free_rows > reserved.rows, self.reserves.may_claim(request)
        if has_row and need <= max_blocks and self.blocks.free >= need + reserved.blocks:
            return self._enter(request, need, queue)
        if not (has_row or claims):
            return False
        cached = self._prefixes.find(request)
        new = need - self.blocks.in_use(cached)
        if has_row and new <= max_blocks and self.blocks.free >= new + reserved.blocks:
            return self._enter(request, need, queue)
        share = self.reserves.equal_share(request)
        if not claims or need > share.blocks:
            return False
        short = Room(reserved.rows + 1 - self.free_rows, reserved.blocks + new - self.blocks.free)
        over_share = OverShare(self._running, share, request.slo_class)
        victims = choose_victims(self._running, short, self.blocks, set(cached), over_share)
        return victims is not None and self._enter(request, need, queue, victims)

    def _need(self, request: Request) -> int:
        return self.blocks.blocks_for(request.prompt_len + request.max_tokens)

    def _enter(self, request: Request, need: int, queue: WaitingQueue, victims: Sequence[Request] = ()) -> bool:
        """Admits or refuses the request, or leaves it in the queue. It stays while its adapter can't be loaded, its
        grammar is being compiled or its prefix is being computed. Returns False if it stays because a running step
        still uses its victims' blocks, or if it is strict and waits for its prefix."""
        if request.grammar is not None and not request.grammar.ready:
            return True
        if self._prefixes.being_computed(request, (*self._running, *self.admitted)):
            return request.slo_class != "strict"  # no other request takes its place meanwhile
        if request.adapter is not None:
            lease = self._lease(request, request.adapter, need)
            if lease is None:
                return True
            if not isinstance(lease, Lease):
                self.refused.append(_refuse(request, lease))
                queue.remove(request)
                return True
            request.lease = lease
        self._give_up(victims)
        cached = self._prefixes.find(request)
        allocated = self.blocks.allocate(need, cached)
        if allocated is None:
            if request.lease is not None:
                self.store.release(request.lease, (), served=False)
                request.lease = None
            return False
        request.blocks, request.known_blocks = allocated, len(cached)
        request.computed = len(cached) * self.blocks.block_tokens
        self.free_rows -= 1
        self.reserves.count(request, 1)
        queue.take(request)
        self.admitted.append(request)
        return True

    def _lease(self, request: Request, adapter: Adapter, need: int) -> Lease | TooLarge | LoadFailed | None:
        """Returns a lease on the request's adapter and starts its load if needed. Returns the reason for a refusal, or
        None if the request has to wait."""
        ready = self.store.ready(adapter.digest)
        if self._keeps_out(request, adapter):
            return None
        if not ready and not self._may_load(request, need):
            return None
        lease = self.store.acquire(adapter, spared=self._spared_from(request, adapter))
        if isinstance(lease, NoRoom) and request.slo_class != "best_effort" and self._make_adapter_room(adapter):
            lease = self.store.acquire(adapter)
        if isinstance(lease, (Pending, NoRoom)):
            self._wait(request, isinstance(lease, NoRoom))
            return None
        if isinstance(lease, Lease) and not ready:
            self._loading.append(request)
        return lease

    def _spared_from(self, request: Request, adapter: Adapter) -> Container[str]:
        """Returns the adapters that must not be evicted for the request. For best effort these are adapters that others
        called within AWAITED_SECONDS, until the request has itself waited for room that long."""
        has_waited = request.short_since and time.monotonic() - request.short_since >= AWAITED_SECONDS
        if request.slo_class != "best_effort" or has_waited or self.store.on_device(adapter.digest):
            return ()
        return self.store.choose_spared(adapter, self.reserves.awaited_adapters())

    def _keeps_out(self, request: Request, adapter: Adapter) -> bool:
        """Returns whether the request must stay in the queue because an earlier one waits for adapter memory."""
        shortages = [self._shortage]
        if request.slo_class == "best_effort":
            shortages.append(self._best_effort_shortage)
        is_short = any(each.is_short for each in shortages) and not self.store.on_device(adapter.digest)
        return is_short or any(each.is_starved for each in shortages)

    def _make_adapter_room(self, adapter: Adapter) -> bool:
        """Preempts best-effort requests whose adapters nobody else uses, to make room on the device. Returns False,
        without preempting any, if that would not suffice."""
        lenders = choose_lenders(self._running, lambda digests: self.store.fits_without(adapter, digests))
        self._give_up(lenders or ())
        return lenders is not None

    def _give_up(self, victims: Sequence[Request]) -> None:
        for victim in victims:
            if victim in self._running:  # otherwise it was already preempted for adapter memory
                self._running.remove(victim)
                self.reserves.count(victim, -1)
                self.free_rows += 1
                self._preempt(victim)

    def _may_load(self, request: Request, need: int) -> bool:
        if request.slo_class == "strict":
            strict = sum(loading.slo_class == "strict" for loading in self._loading)
            if strict < self.reserves.for_strict().rows:
                return True
        best_effort = request.slo_class == "best_effort"
        counted = [loading for loading in self._loading if best_effort or loading.slo_class != "best_effort"]
        if len(counted) >= self._max_loading:
            return False
        blocks = sum(len(loading.blocks) for loading in counted)
        return not blocks or blocks + need <= self.blocks.total // 2

    def _wait(self, request: Request, for_room: bool) -> None:
        now = time.monotonic()
        if not for_room:
            request.held_at = now
            return
        request.short_since = request.short_since or now
        shortage = self._best_effort_shortage if request.slo_class == "best_effort" else self._shortage
        shortage.is_short = True
        shortage.is_starved = shortage.is_starved or now - request.short_since >= STARVED_AFTER


def _book_waits_for_bytes(queue: Iterable[Request]) -> None:
    """Updates `held_s` of waiting requests: adds the seconds since the last call if a request waited only for its
    adapter's bytes."""
    now = time.monotonic()
    for request in queue:
        if request.held_at:
            request.held_s += now - request.held_at
            request.held_at = 0.0


def _refuse(request: Request, reason: TooLarge | LoadFailed) -> Refused:
    assert request.adapter is not None
    name = f"adapter {request.adapter.digest[:12]}"
    if isinstance(reason, TooLarge):
        return Refused(
            request, "too_large", f"{name} needs {reason.need} bytes of adapter memory; this node has {reason.have}"
        )
    return Refused(request, "unavailable", f"{name} could not be loaded on this node", reason.reason, reason.damaged)
