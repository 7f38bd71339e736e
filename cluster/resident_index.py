"""Index of the nodes that hold each adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cluster.news import ABSENT_TIER, Resident

DEVICE, HOST, DISK, ABSENT = range(4)
TIERS = {"device": DEVICE, "host": HOST, "disk": DISK}

_NOWHERE: dict[int, int] = {}
_NOBODY: set[int] = set()


class ResidentIndex:
    """Index of the adapters that the nodes hold, by rows of a NodeTable. An update touches only what changed: nodes
    hold thousands of adapters, and most stay where they are."""

    def __init__(self, rows: int) -> None:
        self._tiers: dict[str, dict[int, int]] = {}
        self._users: dict[str, set[int]] = {}
        self._rows: list[dict[str, Resident]] = [{} for _ in range(rows)]

    def tiers(self, digest: str) -> dict[int, int]:
        """Returns the adapter's tier (DEVICE, HOST or DISK) by row. The result must not be changed."""
        return self._tiers.get(digest, _NOWHERE)

    def users(self, digest: str) -> set[int]:
        """Returns the rows on which requests hold a lease on the adapter. The result must not be changed."""
        return self._users.get(digest, _NOBODY)

    def residents(self, row: int) -> Mapping[str, Resident]:
        """Returns a live view of the adapters that the row's node holds, by digest."""
        return self._rows[row]

    def put(self, row: int, residents: Sequence[Resident]) -> None:
        """Replaces the row's adapters by `residents`, the complete list of its node."""
        after = {resident.digest for resident in residents}
        removed = [Resident(digest, ABSENT_TIER, 0, 0) for digest in self._rows[row] if digest not in after]
        self.change(row, (*removed, *residents))

    def change(self, row: int, residents: Iterable[Resident]) -> None:
        """Updates some of the row's adapters. Those of ABSENT_TIER are removed."""
        rows = self._rows[row]
        for resident in residents:
            digest, is_gone = resident.digest, resident.tier == ABSENT_TIER
            if rows.get(digest) == resident:  # true of almost all adapters in a full report
                continue
            if is_gone:
                rows.pop(digest, None)
            else:
                rows[digest] = resident
            self._place(row, digest, TIERS.get(resident.tier, ABSENT), not is_gone and resident.in_use > 0)

    def _place(self, row: int, digest: str, tier: int, used: bool) -> None:
        if tier != ABSENT:
            self._tiers.setdefault(digest, {})[row] = tier
        elif digest in self._tiers:
            self._tiers[digest].pop(row, None)
            if not self._tiers[digest]:
                del self._tiers[digest]
        if used:
            self._users.setdefault(digest, set()).add(row)
        elif digest in self._users:
            self._users[digest].discard(row)
            if not self._users[digest]:
                del self._users[digest]
