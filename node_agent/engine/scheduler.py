"""Who enters the batch, and which rows the next iteration computes."""

from __future__ import annotations

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


def admit(
    queue: list[Request], free_rows: int, blocks: BlockPool, store: AdapterStore
) -> tuple[list[Request], list[Refused]]:
    """First come, first served, within free rows, KV blocks and adapter memory. Removes what it takes from `queue`.

    A request reserves the blocks of its whole length, so an admitted one always ends. A request whose adapter is still
    being measured is passed over. Behind one that waits for adapter memory, only those pass that need no new room:
    otherwise small adapters could keep a large one out for ever.
    """
    admitted: list[Request] = []
    refused: list[Refused] = []
    room_is_short = False
    for request in queue:
        need = blocks.blocks_for(request.prompt_len + request.max_tokens)
        if len(admitted) == free_rows or need > blocks.free:
            break
        if request.adapter is not None:
            if room_is_short and not store.on_device(request.adapter.digest):
                continue
            found = store.acquire(request.adapter)
            if isinstance(found, (Pending, NoRoom)):
                room_is_short = room_is_short or isinstance(found, NoRoom)
                continue
            if not isinstance(found, Lease):
                refused.append(_refuse(request, found))
                continue
            request.lease = found
        taken = blocks.allocate(need)
        assert taken is not None
        request.blocks = taken
        admitted.append(request)
    gone = {id(request) for request in admitted} | {id(entry.request) for entry in refused}
    if gone:
        queue[:] = [request for request in queue if id(request) not in gone]
    return admitted, refused


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

    Every decoding request advances; prompt chunks share what is left of `chunk_tokens`, oldest first.
    """
    decode = [Row(r, 1) for r in running if r.decoding]
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
