"""What operators ask of a node's adapter memory: what is where, prefetches, evictions."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from node_agent.adapter_memory.residency import InUse, adapter_states, evict, tier_of
from node_agent.adapter_memory.store import AdapterStore
from node_agent.ipc import Answer, Evict, ListAdapters, Prefetch, Question
from node_agent.types import Lease, LoadFailed, NoRoom, TooLarge

MOST_PREFETCHES = 16
"""At a time."""
LONGEST_PREFETCH = 600.0
"""Seconds."""

log = logging.getLogger("garnish.engine")


@dataclass(eq=False)
class _Underway:
    """A prefetch. It waits as a request in the queue does, then holds a lease until the load has ended."""

    order: Prefetch
    deadline: float
    lease: Lease | None = None
    waits: bool = True
    """counted by the store as one who waits for the adapter"""
    to_host: bool = False
    """there was no room on the device"""


class Orders:
    """Called by the engine's thread alone. Each question is answered once."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._underway: list[_Underway] = []
        self._answers: list[Answer] = []

    def take(self, question: Question) -> None:
        match question:
            case ListAdapters(id=id):
                self._answers.append(Answer(id, found=adapter_states(self._store)))
            case Prefetch():
                self._begin(question)
            case Evict(id=id, digest=digest):
                self._answers.append(self._evict(id, digest))

    def poll(self, may_place: bool) -> None:
        """Let prefetches go on; with `may_place` they may take room on the device that nobody uses."""
        self._underway = [each for each in self._underway if not self._advance(each, may_place)]

    def answers(self) -> list[Answer]:
        """Those since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def _begin(self, order: Prefetch) -> None:
        if self._store.ready(order.adapter.digest):
            self._answers.append(Answer(order.id, tier="device"))
        elif len(self._underway) >= MOST_PREFETCHES:
            text = f"{MOST_PREFETCHES} prefetches are under way on this node"
            self._answers.append(Answer(order.id, error_type="overloaded", error=text))
        else:
            self._store.announce(order.adapter)
            self._underway.append(_Underway(order, time.monotonic() + LONGEST_PREFETCH))

    def _advance(self, each: _Underway, may_place: bool) -> bool:
        """Whether it has ended."""
        store, adapter = self._store, each.order.adapter
        if time.monotonic() >= each.deadline:
            return self._end(each, "timeout", f"the prefetch took longer than {LONGEST_PREFETCH:g} s")
        if each.lease is not None:
            failure = store.failure(each.lease)
            if failure is not None:
                return self._fail(each, failure.reason)
            return store.loaded(each.lease) and self._end(each)
        if each.to_host:
            host = store.hosts.load(adapter)
            if host.failed:
                return self._fail(each, host.failed)
            return host.complete and self._end(each)
        if store.ready(adapter.digest):  # for a request, meanwhile
            return self._end(each)
        if may_place:
            return self._place(each)
        found = store.hosts.get(adapter.digest)
        if found is not None and found.complete:
            self._retract(each)  # its bytes must not keep out those of the requests for which it steps back
        return False

    def _place(self, each: _Underway) -> bool:
        """Take room as a request would; true if there will never be any."""
        if not each.waits:
            self._store.announce(each.order.adapter)
            each.waits = True
        found = self._store.acquire(each.order.adapter)
        if isinstance(found, Lease):
            each.lease = found
            self._retract(each)
        elif isinstance(found, NoRoom):
            each.to_host = True
        elif isinstance(found, TooLarge):
            text = f"the adapter needs {found.need} bytes of adapter memory; this node has {found.have}"
            return self._end(each, "too_large", text)
        elif isinstance(found, LoadFailed):
            return self._fail(each, found.reason)
        return False

    def _retract(self, each: _Underway) -> None:
        if each.waits:
            self._store.retract(each.order.adapter.digest)
            each.waits = False

    def _fail(self, each: _Underway, reason: str) -> bool:
        digest = each.order.adapter.digest
        log.warning("a prefetch failed", extra={"digest": digest, "reason": reason})
        return self._end(each, "unavailable", f"adapter {digest[:12]} could not be loaded on this node")

    def _end(self, each: _Underway, error_type: str = "", error: str = "") -> bool:
        digest = each.order.adapter.digest
        if each.lease is not None:
            self._store.release(each.lease, [])
        self._retract(each)
        tier = tier_of(self._store, digest)
        self._answers.append(Answer(each.order.id, tier=tier, error_type=error_type, error=error))
        return True

    def _evict(self, id: str, digest: str) -> Answer:
        try:
            if not evict(self._store, digest):
                return Answer(id, error_type="not_found", error=f"adapter {digest[:12]} is not on this node")
        except InUse as reason:
            return Answer(id, error_type="conflict", error=f"adapter {digest[:12]} is in use: {reason}")
        return Answer(id, tier=tier_of(self._store, digest))
