"""Counts of calls per function. Each gateway worker counts its calls, and reports the counts to the leader every
second."""

from __future__ import annotations

from collections import Counter

import msgspec

from cluster.messages import Adapter

MAX_COUNTED = 2000
"""Maximum versions in one report, some 150 bytes each. Calls of further versions are not counted."""
MAX_COUNTS_A_MESSAGE = 200


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Calls of one version of a function within about a second."""

    tenant: str
    function: str
    adapter: Adapter
    calls: int

    @property
    def key(self) -> str:
        return function_key(self.tenant, self.function)


class CallsCounted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    """Calls that the publishing worker has counted since its last message."""

    arrivals: list[Arrival]


class ArrivalCounter:
    """Counts the calls of one worker."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, Adapter]] = Counter()

    def record(self, tenant: str, function: str, adapter: Adapter) -> None:
        """Counts a call of a function's version."""
        key = (tenant, function, adapter)
        if key in self._calls or len(self._calls) < MAX_COUNTED:
            self._calls[key] += 1

    def take(self) -> list[Arrival]:
        """Returns the counts since the last `take`, and resets them."""
        arrivals = [Arrival(*key, calls) for key, calls in self._calls.items()]
        self._calls.clear()
        return arrivals


def function_key(tenant: str, function: str) -> str:
    """Returns the key `tenant/function`. Neither name contains a slash."""
    return f"{tenant}/{function}"
