"""On how many nodes an adapter is kept, and on which: as few as its demand allows.

Without a bound, an adapter that is called often would soon lie on every node, and push out those that are called less.
Each adapter has homes; a node that is none pays for what another copy displaces (gateway.scheduling.rank_aware). How
many there may be follows what its recent requests take of a node: more at once, fewer only when the demand is clearly
lower and has been for a while. A choice outside makes that node a home; the one that was longest without a request
ceases to be one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection

WINDOW = 30.0
"""Seconds over which demand is averaged."""
FILL = 0.5
"""Of a node's rows, what one adapter may take before it gets another home."""
BAND = 0.3
"""Homes by which the demand must have fallen below the next lower number."""
HOLD = 10.0
"""Seconds between two homes given up."""
LONGEST = 3600.0
"""Seconds of any call."""
ASSUMED_ROWS = 16
"""Of a node that does not tell."""
MAX_ADAPTERS = 32_768
"""Remembered; the one that was called least recently is forgotten, and with its next call gets new homes."""


class _Adapter:
    __slots__ = ("changed", "homes", "load", "request", "seen", "wanted")

    def __init__(self, now: float) -> None:
        self.homes: dict[str, None] = {}
        """Node ids, the one whose last request is longest ago first."""
        self.wanted = 1
        self.load = 0.0
        """Nodes' worth of work, by FILL; decays with WINDOW since `seen`."""
        self.seen = self.changed = now
        self.request = ""
        """The last one counted: a placement that is tried again is the same work."""


class Spreading:
    """`clock`: monotonic seconds. `gateways`: how many processes place requests now; each sees its part of the
    demand."""

    def __init__(
        self, clock: Callable[[], float], *, gateways: Callable[[], int] = lambda: 1, max_adapters: int = MAX_ADAPTERS
    ) -> None:
        self._clock = clock
        self._gateways = gateways
        self._max_adapters = max_adapters
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()

    def homes(self, digest: str) -> Collection[str]:
        """Ids of the nodes where the adapter is at home; none while it may have more than it has."""
        adapter = self._adapters.get(digest)
        if adapter is None or len(adapter.homes) < adapter.wanted:
            return ()
        return adapter.homes.keys()

    def wanted(self, digest: str) -> int:
        """How many homes it may have."""
        adapter = self._adapters.get(digest)
        return 1 if adapter is None else adapter.wanted

    def note(self, digest: str, node_id: str, request_id: str, seconds: float, rows: int) -> None:
        """A request was given to a node, for `seconds` in one of its `rows` (0: not known)."""
        now = self._clock()
        adapter = self._adapters.get(digest)
        if adapter is None:
            adapter = self._adapters[digest] = _Adapter(now)
            if len(self._adapters) > self._max_adapters:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(digest)
        if request_id != adapter.request:
            seconds = min(seconds, LONGEST) if seconds >= 0.0 else 0.0  # NaN, too
            share = seconds / ((rows or ASSUMED_ROWS) * FILL)
            self._demand(adapter, now, share * self._gateways())
            adapter.request = request_id
        adapter.homes.pop(node_id, None)
        adapter.homes[node_id] = None
        while len(adapter.homes) > adapter.wanted:
            del adapter.homes[next(iter(adapter.homes))]

    def forget(self, digest: str, node_id: str) -> None:
        """The node has gone."""
        adapter = self._adapters.get(digest)
        if adapter is not None:
            adapter.homes.pop(node_id, None)

    def _demand(self, adapter: _Adapter, now: float, share: float) -> None:
        adapter.load = adapter.load * math.exp((adapter.seen - now) / WINDOW) + share / WINDOW
        adapter.seen = now
        needed = max(1, math.ceil(adapter.load))
        if needed > adapter.wanted:
            adapter.wanted, adapter.changed = needed, now
        elif adapter.load < adapter.wanted - 1 - BAND and now - adapter.changed >= HOLD:
            adapter.wanted, adapter.changed = adapter.wanted - 1, now
