"""Looks up the versions that calls of many functions use.

Several functions are looked up at once, because a new leader may know none of them, and nodes keep the previous
leader's orders for only some seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from adapters.choices import Choice
from adapters.errors import CorruptRecord, NoSuchFunction, NotFound
from gateway.catalog.functions import Functions
from gateway.leader.tick import Tick

AT_ONCE = 8
"""Maximum lookups at once: half of the threads that read the registry. The other half stays free for calls."""


async def look_up(
    functions: Functions, keys: Sequence[str], tick: Tick
) -> AsyncIterator[tuple[str, Sequence[Choice] | None]]:
    """Yields each function's key with the result of `choices_of`. Raises TickEnded, StoreUnavailable."""
    for first in range(0, len(keys), AT_ONCE):
        tick.check()
        together = keys[first : first + AT_ONCE]
        looked_up = await asyncio.gather(*(choices_of(functions, key) for key in together))
        for key, choices in zip(together, looked_up, strict=True):
            yield key, choices


async def choices_of(functions: Functions, key: str) -> Sequence[Choice] | None:
    """Returns the versions to which a function's alias `latest` points, with their shares; None if the function does
    not exist.

    `key`: `tenant/name`. The result is empty if the function has no alias `latest`, or if a record that is needed is
    damaged. A later call may find versions in either case. Raises StoreUnavailable.
    """
    tenant, _, name = key.partition("/")
    try:
        return await functions.choices(tenant, name, None)
    except NoSuchFunction:
        return None
    except (NotFound, CorruptRecord):
        return ()
