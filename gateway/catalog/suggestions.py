"""Suggests a function to a caller who named one that does not exist.

Suggestions are best effort and cheap. A tenant's names are cached for KEPT_FACTOR times the time that listing them
took, and suggestions per second are limited. So calls with random names cost little more than the lookup that fails.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from adapters.errors import AdapterError, NoSuchFunction, NotFound
from adapters.nearest import NameIndex, nearest
from adapters.registry import Registry
from adapters.store import MAX_LIST
from gateway.catalog.threads import StoreThreads

MAX_NAMES = 50_000
"""Maximum names of one tenant that are listed. Names after these, in the list's order, are not suggested."""
MAX_KEPT = 200_000
MAX_TENANTS = 1000
"""Maximum cached names of all tenants together (MAX_KEPT), and maximum tenants with cached names. The least recently
used tenant is forgotten."""
KEPT_FACTOR = 20.0
"""Factor by which a list of names is cached longer than listing took. So listing takes at most a twentieth of one
thread's time."""
PATIENCE = 0.5
"""Seconds for which an error reply waits for the list of the tenant's names."""
MAX_PER_SECOND = 5


@dataclass
class _Tenant:
    index: NameIndex = field(default_factory=lambda: NameIndex(()))
    expires: float = 0.0
    listing: asyncio.Task[None] | None = None
    second: int = 0
    suggestions: int = 0


class Suggestions:
    def __init__(self, registry: Registry, threads: StoreThreads, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._threads = threads
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    async def add_to(self, error: NoSuchFunction, with_base: bool) -> NoSuchFunction:
        """Returns the error, extended by the name that was probably meant.

        `with_base`: the base model may be suggested, too. Never raises. Takes at most 2 * PATIENCE seconds.
        """
        try:
            async with asyncio.timeout(2 * PATIENCE):
                meant = await self._meant(error.tenant, error.function, with_base)
        except (AdapterError, TimeoutError):
            return error
        return NoSuchFunction(error.tenant, error.function, meant) if meant else error

    async def _meant(self, tenant: str, typed: str, with_base: bool) -> str | None:
        state = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        if not self._take_budget(state):
            return None
        if state.listing is None and self._clock() >= state.expires:
            state.listing = asyncio.ensure_future(self._list(tenant, state))
        if state.listing is not None:
            await asyncio.wait({state.listing}, timeout=PATIENCE)
        base = [self._registry.base.id] if with_base else []
        close = nearest(typed, [*state.index.nearest(typed, 2), *base], 3)
        for name in close:
            if name in base or await self._exists(tenant, name):
                return name
        return None

    def _take_budget(self, state: _Tenant) -> bool:
        """Counts a suggestion. Returns False if it exceeds the tenant's budget of this second."""
        second = int(self._clock())
        if state.second != second:
            state.second, state.suggestions = second, 0
        state.suggestions += 1
        return state.suggestions <= MAX_PER_SECOND

    async def _list(self, tenant: str, state: _Tenant) -> None:
        """Reads the tenant's names into `state`. If the store fails, the earlier names are kept and it is tried again
        later."""
        started, names, after = self._clock(), list[str](), ""
        try:
            while len(names) < MAX_NAMES:
                page = await self._threads.read(self._registry.names, tenant, after)
                names += page
                if len(page) < MAX_LIST:
                    break
                after = page[-1]
            state.index = await self._threads.read(NameIndex, names)
        except AdapterError:
            pass
        finally:
            ended = self._clock()
            state.expires = ended + KEPT_FACTOR * (ended - started)
            state.listing = None
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        names = sum(len(state.index) for state in self._tenants.values())
        while len(self._tenants) > 1 and (names > MAX_KEPT or len(self._tenants) > MAX_TENANTS):
            names -= len(self._tenants.popitem(last=False)[1].index)

    async def _exists(self, tenant: str, name: str) -> bool:
        """Returns whether a listed name belongs to a function. Leftovers of deleted functions are listed as well."""
        try:
            await self._threads.read(self._registry.function, tenant, name)
        except NotFound:
            return False
        return True
