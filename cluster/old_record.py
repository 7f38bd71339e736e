"""Records of protocol version 1, which nodes of the release before send: lists in place of sums, and all residents.

They become News where they come in, and nothing behind that knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cluster.news import (
    ABSENT_TIER,
    RECORD_VERSION,
    WHOLE,
    Changes,
    News,
    NodeRecord,
    Resident,
    StrictRoom,
    facts_of,
    heartbeat_of,
    rank_sums,
)


class OldResident(Resident, frozen=True, array_like=False):
    pass


class OldStrictRoom(StrictRoom, frozen=True, array_like=False, omit_defaults=True):
    pass


class OldRecord(NodeRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A NodeRecord whose sums are still to be made, from a number per request in each list."""

    batch_ranks: list[int] = msgspec.field(default_factory=list)
    batch_contexts: list[int] = msgspec.field(default_factory=list)
    batch_slots: list[int] = msgspec.field(default_factory=list)
    """Of each running request, a number that names its adapter on this node; -1 for the base alone."""
    queued_ranks: list[int] = msgspec.field(default_factory=list)
    """Of each waiting request, the rank of its adapter."""
    strict: OldStrictRoom | None = None
    residents: list[OldResident] = msgspec.field(default_factory=list)
    acknowledged: list[str] = msgspec.field(default_factory=list)
    """Ids of requests received since the record before; ends their reservations."""
    v: int = 1


_decoder, _old_decoder = msgspec.msgpack.Decoder(News), msgspec.msgpack.Decoder(OldRecord)


def decode_news(body: bytes) -> News | OldRecord:
    """Returns the news of a body, or a record of version 1. Raises msgspec.DecodeError."""
    is_map = body[:1] in (b"\xde", b"\xdf") or 0x80 <= int.from_bytes(body[:1]) <= 0x8F  # News is an array
    return (_old_decoder if is_map else _decoder).decode(body)


def record_of_old(old: OldRecord) -> NodeRecord:
    same = {name: getattr(old, name) for name in NodeRecord.__struct_fields__}
    ranks = old.batch_ranks
    slots = [None if slot < 0 else slot for slot in old.batch_slots] + [None] * (len(ranks) - len(old.batch_slots))
    made = {
        "strict": None if old.strict is None else StrictRoom(**msgspec.structs.asdict(old.strict)),
        "contexts": sum(old.batch_contexts),
        "v": RECORD_VERSION,
        **rank_sums(list(zip(slots, ranks, strict=False)), old.queued_ranks),
    }
    return NodeRecord(**{**same, **made})


def news_of_old(old: OldRecord, known: Mapping[str, Resident] | None) -> News:
    """Returns a version 1 record as news. `known`: what the receiver knows of this epoch's residents, so that only the
    differences go on from here; None: nothing."""
    record = record_of_old(old)
    residents = {r.digest: Resident(r.digest, r.tier, r.bytes, r.in_use) for r in old.residents}
    changed = [resident for resident in residents.values() if known is None or known.get(resident.digest) != resident]
    gone = [digest for digest in known or () if digest not in residents]
    changed += [Resident(digest, ABSENT_TIER, 0, 0) for digest in gone]
    since = WHOLE if known is None else 0
    return News(heartbeat_of(record), facts_of(record), Changes(since, old.seq, changed, old.acknowledged))
