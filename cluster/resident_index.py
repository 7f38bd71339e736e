"""Which nodes hold an adapter: the records' residents, turned round."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.messages import Resident

DEVICE, HOST, DISK, ABSENT = range(4)
TIERS = {"device": DEVICE, "host": HOST, "disk": DISK}

_NOWHERE: dict[int, int] = {}
_NOBODY: set[int] = set()


class ResidentIndex:
    """By rows of a table. Taking a record in touches only what changed: nodes hold thousands of adapters, and most stay
    where they are."""

    def __init__(self, rows: int) -> None:
        self._tiers: dict[str, dict[int, int]] = {}
        self._users: dict[str, set[int]] = {}
        self._held: list[dict[str, int]] = [{} for _ in range(rows)]
        self._used: list[set[str]] = [set() for _ in range(rows)]

    def tiers(self, digest: str) -> dict[int, int]:
        """Row -> DEVICE, HOST or DISK. Not to be changed."""
        return self._tiers.get(digest, _NOWHERE)

    def users(self, digest: str) -> set[int]:
        """Rows where requests hold a lease on it. Not to be changed."""
        return self._users.get(digest, _NOBODY)

    def put(self, row: int, residents: Sequence[Resident]) -> None:
        """All that the row's node holds now."""
        before, after = self._held[row], {e.digest: TIERS[e.tier] for e in residents if e.tier in TIERS}
        for digest in before.keys() - after.keys():
            del self._tiers[digest][row]
            if not self._tiers[digest]:
                del self._tiers[digest]
        for digest, tier in after.items() - before.items():
            self._tiers.setdefault(digest, {})[row] = tier
        used = {entry.digest for entry in residents if entry.in_use > 0}
        for digest in self._used[row] - used:
            self._users[digest].discard(row)
            if not self._users[digest]:
                del self._users[digest]
        for digest in used - self._used[row]:
            self._users.setdefault(digest, set()).add(row)
        self._held[row], self._used[row] = after, used
