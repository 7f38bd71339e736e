"""Who enters the batch, and which rows the next iteration computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.batch import Row
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.request import Request
from node_agent.types import Lease, LoadFailed, NoRoom, Pending, TooLarge


@dataclass(frozen=True)
class Refused:
    """The request can never run here."""

    request: Request
    type: str
    message: str
    cause: str = ""
    """for the log"""


STARVED_AFTER = 1.0
"""Seconds that a request waits for adapter memory before no later one may take or share any."""


class Admission:
    """One look at the queue: first come, first served, within free rows, KV blocks and adapter memory.

    A request reserves the blocks of its whole length, so an admitted one always ends. Two exceptions to the order keep
    one request's wait from becoming everyone's:
    - Requests whose adapter is not on the device yet hold at most a quarter of the rows, and (but for the first of
      them) half of the KV blocks: the others are passed over and go on loading.
    - Behind one that waits for adapter memory only those pass that need no new room, or else small adapters could keep
      a large one out for ever; once it has waited for STARVED_AFTER, none with an adapter passes, or else adapters in
      steady use could.
    """

    def __init__(self, running: list[Request], max_rows: int, blocks: BlockPool, store: AdapterStore) -> None:
        self.blocks, self.store = blocks, store
        self.free_rows = max_rows - len(running)
        loading = [r for r in running if r.lease is not None and not store.loaded(r.lease)]
        self._loading_rows_left = max(1, max_rows // 4) - len(loading)
        self._loading_blocks = sum(len(r.blocks) for r in loading)
        self._room_is_short = False
        self._starved = False
        self.admitted: list[Request] = []
        self.refused: list[Refused] = []

    def look_at(self, queue: list[Request]) -> None:
        """Removes from `queue` what it admits or refuses."""
        left: list[Request] = []
        _note_held(queue)
        for i, request in enumerate(queue):
            need = self.blocks.blocks_for(request.prompt_len + request.max_tokens)
            if len(self.admitted) == self.free_rows or need > self.blocks.free:
                left += queue[i:]
                break
            if not self._lease(request, need):
                left.append(request)
        queue[:] = left

    def _lease(self, request: Request, need: int) -> bool:
        """False: it stays in the queue."""
        if request.adapter is not None:
            digest = request.adapter.digest
            ready = self.store.ready(digest)
            if self._starved or (self._room_is_short and not self.store.on_device(digest)):
                return False
            if not ready and not self._may_load(need):
                return False
            found = self.store.acquire(request.adapter)
            if isinstance(found, (Pending, NoRoom)):
                self._wait(request, isinstance(found, NoRoom))
                return False
            if not isinstance(found, Lease):
                self.refused.append(_refuse(request, found))
                return True
            request.lease = found
            if not ready:
                self._loading_rows_left -= 1
                self._loading_blocks += need
        taken = self.blocks.allocate(need)
        assert taken is not None
        request.blocks = taken
        self.admitted.append(request)
        return True

    def _may_load(self, need: int) -> bool:
        if self._loading_rows_left <= 0:
            return False
        return not self._loading_blocks or self._loading_blocks + need <= self.blocks.total // 2

    def _wait(self, request: Request, for_room: bool) -> None:
        now = time.monotonic()
        if not for_room:
            request.held_at = now
            return
        request.short_since = request.short_since or now
        self._room_is_short = True
        self._starved = self._starved or now - request.short_since >= STARVED_AFTER


def _note_held(queue: list[Request]) -> None:
    """Book what passed since the last look at those whose adapter's bytes were all that they waited for then."""
    now = time.monotonic()
    for request in queue:
        if request.held_at:
            request.held += now - request.held_at
            request.held_at = 0.0


def _refuse(request: Request, found: TooLarge | LoadFailed) -> Refused:
    assert request.adapter is not None
    name = f"adapter {request.adapter.digest[:12]}"
    if isinstance(found, TooLarge):
        return Refused(
            request, "too_large", f"{name} needs {found.need} bytes of adapter memory; this node has {found.have}"
        )
    return Refused(request, "unavailable", f"{name} could not be loaded on this node", found.reason)


def choose_hot(running: list[Request], loaded: Callable[[Request], bool], chunk_tokens: int) -> tuple[list[Row], int]:
    """Rows of the next hot pass (decode rows first, each part in order of adapter slots), and how many decode.

    Every decoding request advances (one whose prompt was computed before its whole adapter was there waits for the
    rest); prompt chunks share what is left of `chunk_tokens`, oldest first.
    """
    decode = [Row(r, 1) for r in running if r.decoding and loaded(r)]
    budget = max(chunk_tokens - len(decode), 1)
    prefill: list[Row] = []
    for request in running:
        if not budget:
            break
        if request.decoding or request.in_cold_pass or not loaded(request):
            continue
        length = min(len(request.tokens) - request.computed, budget)
        prefill.append(Row(request, length))
        budget -= length
    decode.sort(key=_slot)
    prefill.sort(key=_slot)
    return decode + prefill, len(decode)


def _slot(row: Row) -> int:
    return -1 if row.request.lease is None else row.request.lease.slot
