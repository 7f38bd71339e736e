"""Numbers the changes of a node's resident adapters and facts, so that the gateway receives only changes."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.news import (
    ABSENT_TIER,
    FULL_REPORT,
    Changes,
    Facts,
    NodeRecord,
    NodeReport,
    Resident,
    facts_from,
    heartbeat_from,
)


class ResidencyLog:
    """Log of changes to a node's adapters and facts. Of several changes of an adapter, only the last is kept."""

    def __init__(self) -> None:
        self.at = 0
        self._facts: Facts | None = None
        self._facts_at = 0
        self._published: Sequence[Resident] = ()
        self._residents: dict[str, Resident] = {}
        self._changed: dict[str, int] = {}
        """Number of each adapter's last change, by digest, in ascending order. Removed adapters stay until the gateway
        has acknowledged their removal."""

    def news(self, record: NodeRecord, residents: Sequence[Resident], acknowledged: int) -> NodeReport:
        """Returns the report for a gateway that has acknowledged changes up to number `acknowledged`; FULL_REPORT: a
        full report."""
        self._record_changes(facts_from(record), residents)
        if acknowledged == FULL_REPORT:
            return NodeReport(heartbeat_from(record), self._facts, Changes(FULL_REPORT, self.at, list(residents)))
        self._forget(acknowledged)
        changed = [
            self._residents.get(digest, Resident(digest, ABSENT_TIER, 0, 0))
            for digest, at in self._changed.items()
            if at > acknowledged
        ]
        facts = self._facts if self._facts_at > acknowledged else None
        return NodeReport(heartbeat_from(record), facts, Changes(acknowledged, self.at, changed))

    def _record_changes(self, facts: Facts, residents: Sequence[Resident]) -> None:
        number = self.at + 1
        if facts != self._facts:
            self._facts, self._facts_at, self.at = facts, number, number
        if residents is self._published:  # the engine has sent no newer snapshot
            return
        now = {resident.digest: resident for resident in residents}
        changed = [digest for digest, resident in now.items() if self._residents.get(digest) != resident]
        for digest in [*changed, *(self._residents.keys() - now.keys())]:
            self._changed.pop(digest, None)
            self._changed[digest] = self.at = number
        self._published, self._residents = residents, now

    def _forget(self, acknowledged: int) -> None:
        while self._changed and (oldest := next(iter(self._changed.items())))[1] <= acknowledged:
            del self._changed[oldest[0]]
