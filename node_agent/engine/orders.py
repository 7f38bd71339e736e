"""Operators' commands for a node's adapter memory: list adapters, prefetch, evict."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from node_agent.adapter_memory.priority import Priority
from node_agent.engine.adapter_tiers import AdapterTiers
from node_agent.engine.prefetch_load import PrefetchLoad
from node_agent.engine.prefetcher import Prefetcher
from node_agent.ipc import AdapterQuestion, Answer, Evict, ListAdapters, Prefetch
from node_agent.leases import InUse, LoadFailed, TooLarge

MAX_PREFETCHES = 16
MAX_TENANT_PREFETCHES = 8
MAX_PREFETCH_S = 600.0
"""Seconds after which an operator's prefetch is ended with the error `timeout`."""

log = logging.getLogger("garnish.engine")


@dataclass(eq=False)
class _Underway:
    """Running prefetch that an operator has asked for. The operator's question is not answered yet."""

    order: Prefetch
    deadline: float
    load: PrefetchLoad


class Orders:
    """Operators' commands and their answers. Only the engine's thread calls it. It answers each question exactly
    once."""

    def __init__(self, tiers: AdapterTiers, prefetcher: Prefetcher) -> None:
        self._tiers, self._prefetcher = tiers, prefetcher
        self._underway: list[_Underway] = []
        self._answers: list[Answer] = []

    def take(self, question: AdapterQuestion) -> None:
        match question:
            case ListAdapters(id=id):
                self._answers.append(Answer(id, found=self._tiers.states()))
            case Prefetch():
                self._begin(question)
            case Evict(id=id, digest=digest):
                self._answers.append(self._evict(id, digest))

    def poll(self, may_place: bool) -> None:
        """Advances the operators' prefetches. `may_place`: whether they may use free adapter memory on the device."""
        self._underway = [each for each in self._underway if not self._advance(each, may_place)]

    def answers(self) -> list[Answer]:
        """Returns the answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def _begin(self, order: Prefetch) -> None:
        if self._tiers.ready(order.adapter.digest):
            self._answers.append(Answer(order.id, tier="device"))
        elif (busy := self._busy(order.tenant)) is not None:
            self._answers.append(Answer(order.id, error_type="overloaded", error=busy))
        else:
            load = PrefetchLoad(self._tiers, order.adapter, Priority.ORDER, tenant=order.tenant)
            self._underway.append(_Underway(order, time.monotonic() + MAX_PREFETCH_S, load))

    def _busy(self, tenant: str) -> str | None:
        """Returns why no further prefetch may start now; None if one may."""
        if len(self._underway) >= MAX_PREFETCHES:
            return f"{MAX_PREFETCHES} prefetches are under way on this node"
        if tenant and sum(each.order.tenant == tenant for each in self._underway) >= MAX_TENANT_PREFETCHES:
            return f"{MAX_TENANT_PREFETCHES} prefetches of this tenant are under way on this node"
        return None

    def _advance(self, each: _Underway, may_place: bool) -> bool:
        """Advances one prefetch. Returns whether it has ended."""
        if time.monotonic() >= each.deadline:
            each.load.end()
            return self._end(each, "timeout", f"the prefetch took longer than {MAX_PREFETCH_S:g} s")
        outcome = each.load.advance(may_place)
        if outcome is None:
            return False
        if isinstance(outcome, TooLarge):
            text = f"the adapter needs {outcome.need} bytes of adapter memory; this node has {outcome.have}"
            return self._end(each, "too_large", text)
        if isinstance(outcome, LoadFailed):
            digest = each.order.adapter.digest
            log.warning("a prefetch failed", extra={"digest": digest, "reason": outcome.reason})
            return self._end(each, "unavailable", f"adapter {digest[:12]} could not be loaded on this node")
        return self._end(each)

    def _end(self, each: _Underway, error_type: str = "", error: str = "") -> bool:
        tier = self._tiers.tier(each.order.adapter.digest)
        self._answers.append(Answer(each.order.id, tier=tier, error_type=error_type, error=error))
        return True

    def _evict(self, id: str, digest: str) -> Answer:
        self._prefetcher.cancel(digest)
        try:
            if not self._tiers.evict(digest):
                return Answer(id, error_type="not_found", error=f"adapter {digest[:12]} is not on this node")
        except InUse as reason:
            return Answer(id, error_type="conflict", error=f"adapter {digest[:12]} is in use: {reason}")
        return Answer(id, tier=self._tiers.tier(digest))
