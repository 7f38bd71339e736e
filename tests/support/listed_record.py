"""Node records for tests that state running and waiting requests as lists, from which the record's sums follow."""

from __future__ import annotations

import math

import msgspec

from cluster.news import NodeRecord, NodeReport, Resident, full_report, rank_sums
from cluster.node_table import NodeTable


class ListedRecord(NodeRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A NodeRecord whose sums `to_record` makes from one number per request in each list, and the node's residents."""

    batch_ranks: list[int] = msgspec.field(default_factory=list)
    batch_contexts: list[int] = msgspec.field(default_factory=list)
    batch_slots: list[int] = msgspec.field(default_factory=list)
    """A number that names each running request's adapter; -1 for the base alone."""
    queued_ranks: list[int] = msgspec.field(default_factory=list)
    residents: list[Resident] = msgspec.field(default_factory=list)
    acknowledged: list[str] = msgspec.field(default_factory=list)
    """Requests whose reservations end when a table takes the record in."""

    def to_record(self) -> NodeRecord:
        fields = {name: getattr(self, name) for name in NodeRecord.__struct_fields__}
        slots = [None if slot < 0 else slot for slot in self.batch_slots]
        slots += [None] * (len(self.batch_ranks) - len(slots))
        padded = self.performance.decode.padded_rank if self.performance is not None else 0
        sums = rank_sums(list(zip(slots, self.batch_ranks, strict=False)), self.queued_ranks, padded)
        return NodeRecord(**{**fields, "contexts": sum(self.batch_contexts), **sums})


def put_record(table: NodeTable, record: ListedRecord | NodeRecord, last_seen: float = math.nan) -> int:
    """Has the table take the record in; returns the node's row."""
    if isinstance(record, ListedRecord):
        return table.put(record.to_record(), last_seen, residents=record.residents, acknowledged=record.acknowledged)
    return table.put(record, last_seen)


def full_news(record: ListedRecord) -> NodeReport:
    """Returns news with all that there is to report of the node."""
    return full_report(record.to_record(), record.residents, record.seq)
