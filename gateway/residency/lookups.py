"""Looks up what calls of many functions get.

A few are looked up at a time: a new leader may know none of them yet, and nodes keep what the leader before wanted for
some seconds only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from adapters.choices import Choice
from adapters.errors import CorruptRecord, NoSuchFunction, NotFound
from gateway.catalog.functions import Functions
from gateway.leader.tick import Tick

AT_ONCE = 8
"""Half of the threads that read: calls have the others."""


async def look_up(
    functions: Functions, keys: Sequence[str], tick: Tick
) -> AsyncIterator[tuple[str, Sequence[Choice] | None]]:
    """Yields each function with its `choices_of`. Raises TickEnded, StoreUnavailable."""
    for first in range(0, len(keys), AT_ONCE):
        tick.check()
        together = keys[first : first + AT_ONCE]
        looked_up = await asyncio.gather(*(choices_of(functions, key) for key in together))
        for key, choices in zip(together, looked_up, strict=True):
            yield key, choices


async def choices_of(functions: Functions, key: str) -> Sequence[Choice] | None:
    """Returns what a function's `latest` stands for, by `tenant/name`: nothing where it has none now or is damaged, for
    it may get one again or be mended; None where the function is gone. Raises StoreUnavailable."""
    tenant, _, name = key.partition("/")
    try:
        return await functions.choices(tenant, name, None)
    except NoSuchFunction:
        return None
    except (NotFound, CorruptRecord):
        return ()
