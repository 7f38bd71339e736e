"""Manual holds: nodes keep an adapter that was loaded by a manual order ready for HOLD_S seconds.

Every gateway worker stores the holds, because any worker may become the leader.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from cluster.messages import Adapter
from gateway.residency.messages import Tier

HOLD_S = 300.0
"""Seconds from the last order until a hold ends."""
MAX_HELD = 1000
MAX_TENANT_HELD = 64
"""Maximum holds of one tenant. Beyond this and MAX_HELD, the least recently ordered hold is forgotten."""


class ManualHold(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    """Adapter that a node must have ready because of a manual order."""

    tenant: str
    function: str
    adapter: Adapter
    node: str
    tier: Tier
    seconds: float = HOLD_S


class ManualHolds:
    """Manual holds as one worker knows them. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[tuple[str, str, str, str], tuple[ManualHold, float]] = OrderedDict()
        """Each hold and the time at which it ends (monotonic seconds), by tenant, function, digest and node."""

    def hold(self, want: ManualHold) -> None:
        key = (want.tenant, want.function, want.adapter.digest, want.node)
        self._until[key] = (want, self._clock() + want.seconds)
        self._until.move_to_end(key)
        of_tenant = [each for each in self._until if each[0] == want.tenant]
        if len(of_tenant) > MAX_TENANT_HELD:
            del self._until[of_tenant[0]]
        elif len(self._until) > MAX_HELD:
            self._until.popitem(last=False)

    def has(self, tenant: str, function: str) -> bool:
        return any(key[:2] == (tenant, function) for key in self._until)

    def forget(self, tenant: str, function: str) -> None:
        for key in [key for key in self._until if key[:2] == (tenant, function)]:
            del self._until[key]

    def now(self) -> list[ManualHold]:
        """Returns the holds that have not ended, the most recently ordered last."""
        now = self._clock()
        for key in [key for key, (_, until) in self._until.items() if until <= now]:
            del self._until[key]
        return [msgspec.structs.replace(want, seconds=until - now) for want, until in self._until.values()]
