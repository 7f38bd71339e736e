"""Whether calls that ran at once were ever more than a limit that changes allows, told from outside the service.

Only what is certain counts. A call was let in after it was sent and before its first token; it ran at least from its
first token until the time that the service says it took in all, after it was sent. A limit may be in force from when it
was sent until a later one is acknowledged, and STALE_S longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

STALE_S = 3.0
"""For which a worker may go on with an earlier policy: a second, and what a busy host adds."""
AWAY_S = 8.0
"""After Redis is back, for workers to notice, and calls to end that were let in meanwhile."""


class _Limit(NamedTuple):
    value: int
    sent: float
    acknowledged: float | None


class _Call(NamedTuple):
    sent: float
    first: float
    end: float
    """At the earliest."""


class ConcurrencyJudge:
    """All times in monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._limits: list[_Limit] = []
        self._calls: list[_Call] = []

    def note_limit(self, value: int, sent: float, acknowledged: float | None) -> None:
        """A limit was set; None: nobody knows whether."""
        self._limits.append(_Limit(value, sent, acknowledged))

    def note_call(self, sent: float, first: float, seconds: float) -> None:
        """A call was done. `first`: when its first token came; `seconds`: that it took, as the service says."""
        self._calls.append(_Call(sent, first, sent + seconds))

    def over(self, away: Sequence[tuple[float, float]]) -> tuple[int, int]:
        """Returns how many calls were let in beside too many others: while the workers' shared count was in order, and
        beyond twice the limit while it was not (`away`: from and to). Then each of two workers gives away its half,
        whatever ran before."""
        over = over_twice = 0
        for call in self._calls:
            beside = sum(other.first <= call.sent and other.end >= call.first for other in self._calls)
            limit = self._most(call.sent, call.first)
            is_away = any(begin <= call.first and call.sent <= end + AWAY_S for begin, end in away)
            over += not is_away and beside + 1 > limit
            over_twice += beside + 1 > 2 * limit
        return over, over_twice

    def _most(self, begin: float, end: float) -> int:
        """Returns the highest limit that may have been in force at some time between."""
        past = [
            at for at, each in enumerate(self._limits) if each.acknowledged and each.acknowledged + STALE_S <= begin
        ]
        first = past[-1] if past else 0
        return max(each.value for each in self._limits[first:] if each.sent <= end)
