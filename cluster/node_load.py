"""Load of a node as sums. Those over the node's record are computed once, when the record arrives. Those over places
reserved since then are computed separately."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from cluster.messages import SloClass
from cluster.news import NodeRecord
from cluster.performance_model import PerformanceModel, PrefillModel, counted_rank

MAX_COUNT = 1 << 53
"""Upper bound of all counts. Up to it a record's integers are exact as floats, and sums fit in 64 bits."""
MARGIN = 0.8
"""Fraction of a promised TPOT that nodes aim at when they plan passes, because forecasts err and passes vary."""


class Demand(msgspec.Struct, frozen=True):
    """Resources that a request needs on the node where a place is reserved for it.

    The demand is added to the node's load until the node's own record includes the request, or the reservation ends.
    """

    rank: int = 0
    """Largest rank of the adapter; 0: the base model alone."""
    prompt_tokens: int = 0
    max_tokens: int = 0
    tpot: float | None = None
    """Promised TPOT in seconds; None: nothing is promised."""
    displaces: bool = False
    """True: the request may displace another one in a full queue. Either its tenant has fewer requests waiting, or it
    is strict and displaces a best-effort request."""
    slo_class: SloClass = "standard"


class RoomForStrict(msgspec.Struct, frozen=True):
    """Room for the next strict request on a node: StrictRoom of its record, with bounded counts and KV blocks as
    tokens."""

    rows: int
    kv_tokens: int
    queued: int
    prompt_tokens: int
    paused_rows: int
    paused_contexts: int
    tightest_tpot: float
    """Tightest TPOT (seconds) promised to a strict request; infinite when none is promised."""


class NodeLoad(msgspec.Struct, frozen=True):
    """Load of a node from its record. Counts are from 0 to MAX_COUNT. Ranks and prompt tokens are of running and queued
    requests."""

    ready: bool
    running: int
    queued: int
    queue_limit: int
    max_rows: int
    max_context: int
    kv_tokens_free: int
    kv_tokens: int
    contexts: int
    prompt_tokens: int
    max_rank: int
    request_ranks: int
    adapter_ranks: int
    tightest_tpot: float
    """Tightest TPOT (seconds) promised to a request; infinite when none is promised."""
    loading_bytes: int
    strict: RoomForStrict | None = None
    best_effort: int = 0
    """Number of best-effort requests among the running and queued ones."""
    adapter_itemsize: int = 0
    """Bytes per adapter element on the device; 0: not reported."""
    rank_limit: int = MAX_COUNT
    """Largest rank of an adapter that the node takes."""


def load_of(record: NodeRecord) -> NodeLoad:
    """Returns the load that the record states, with all counts bounded."""
    return NodeLoad(
        ready=record.state == "ready",
        running=count(record.running),
        queued=count(record.queued),
        queue_limit=count(record.queue_limit),
        max_rows=count(record.max_rows),
        max_context=count(record.max_context),
        kv_tokens_free=count(record.kv_blocks_free * record.block_tokens),
        kv_tokens=count(record.kv_blocks * record.block_tokens),
        contexts=count(record.contexts),
        prompt_tokens=count(record.prompt_tokens_left),
        max_rank=count(record.max_rank),
        request_ranks=count(record.request_ranks),
        adapter_ranks=count(record.adapter_ranks),
        tightest_tpot=_promise(record.tightest_tpot),
        loading_bytes=count(record.loading_bytes),
        adapter_itemsize=count(record.adapter_itemsize),
        strict=_room_for_strict(record),
        best_effort=count(record.best_effort),
        rank_limit=count(record.rank_limit) or MAX_COUNT,
    )


def _room_for_strict(record: NodeRecord) -> RoomForStrict | None:
    room = record.strict
    if room is None:
        return None
    return RoomForStrict(
        rows=count(room.rows),
        kv_tokens=count(room.blocks * record.block_tokens),
        queued=count(room.queued),
        prompt_tokens=count(room.prompt_tokens),
        paused_rows=count(room.paused_rows),
        paused_contexts=count(room.paused_contexts),
        tightest_tpot=_promise(room.tightest_tpot),
    )


def _promise(tpot: float | None) -> float:
    """Returns the promised TPOT in seconds; infinite without a promise. Values that are not positive, and NaN, count as
    no promise: NaN would hide other values."""
    return tpot if tpot is not None and tpot > 0 else math.inf


def count(value: int) -> int:
    """Returns the value, clipped to 0 to MAX_COUNT."""
    return min(max(value, 0), MAX_COUNT)


class ReservedLoad(msgspec.Struct):
    """Sums over the requests with reserved places. `tokens` is prompt + `max_tokens`; `token_ranks` is prompt tokens x
    rank; `best_effort` counts the best-effort requests. Ranks are those that the node's model counts."""

    tokens: int = 0
    prompt_tokens: int = 0
    token_ranks: int = 0
    ranks: int = 0
    max_rank: int = 0
    best_effort: int = 0


def reserved_load(demands: Iterable[Demand], model: PerformanceModel) -> ReservedLoad:
    """Returns the sums over the demands of reserved places on a node with this model."""
    load, in_steps, in_prompts = ReservedLoad(), model.decode.padded_rank, model.prefill.padded_rank
    for demand in demands:
        rank = counted_rank(demand.rank, in_steps)
        load.tokens += demand.prompt_tokens + demand.max_tokens
        load.prompt_tokens += demand.prompt_tokens
        load.token_ranks += demand.prompt_tokens * counted_rank(demand.rank, in_prompts)
        load.ranks += rank
        load.max_rank = max(load.max_rank, rank)
        load.best_effort += demand.slo_class == "best_effort"
    return load


def tightest_tpot(promised: Iterable[float], model: PerformanceModel | None) -> float:
    """Returns the tightest promised TPOT (seconds) that the node could meet for a single request; infinite when there
    is none. A promise that it can't meet is ignored, since it would keep all other requests out. NaN is ignored too,
    since it would hide the other values."""
    lowest = model.decode.seconds(1, 0, 0) if model is not None else 0.0
    return min((tpot for tpot in promised if tpot >= lowest), default=math.inf)


def prompts_before(model: PrefillModel, tokens: int, token_ranks: int) -> float:
    """Returns the seconds that waiting prompts add to the prefill pass of a newly arriving prompt. `tokens` and
    `token_ranks` are sums over the waiting prompts."""
    return model.per_token * tokens + model.per_token_rank * token_ranks


class Availability(msgspec.Struct, frozen=True):
    """Room and waiting time for a request that arrives now. `kv_room` is in tokens, `prompt_wait` and `saved` in
    seconds."""

    rows_free: float
    kv_room: float
    prompt_wait: float
    saved: float = 0.0
    tightest_tpot: float = math.inf
    """Tightest TPOT (seconds) promised to strict requests."""


def availability_for_strict(
    load: NodeLoad, room: RoomForStrict, demands: Iterable[Demand], model: PerformanceModel
) -> Availability:
    """Returns the availability of the node for the next strict request, given the reserved `demands`. Places of
    best-effort requests do not count as taken, because they are given up. Places of standard requests do count."""
    firm = [demand for demand in demands if demand.slo_class != "best_effort"]
    coming = [demand for demand in firm if demand.slo_class == "strict"]
    reserved, strict = reserved_load(firm, model), reserved_load(coming, model)
    promised = [room.tightest_tpot, *(demand.tpot for demand in coming if demand.tpot is not None)]
    prompts = room.prompt_tokens + strict.prompt_tokens
    return Availability(
        rows_free=room.rows - room.queued - len(firm),
        kv_room=room.kv_tokens - reserved.tokens if load.kv_tokens else math.inf,
        prompt_wait=prompts_before(model.prefill, prompts, strict.token_ranks),
        saved=model.decode.seconds_saved(load.running, room.paused_rows, room.paused_contexts),
        tightest_tpot=tightest_tpot(promised, model),
    )
