"""Who begins to lead looks up many functions, a few at a time: what nodes keep must not lapse before."""

from __future__ import annotations

import asyncio
import math

import pytest
from numbered_adapters import DIGESTS

from adapters.choices import Choice, Resolved
from adapters.errors import CorruptFunction, NoSuchFunction, NotFound, StoreUnavailable
from adapters.functions import Policy
from gateway.leader.tick import Tick, TickEnded
from gateway.residency import lookups
from gateway.residency.lookups import look_up

KEYS = [f"t/f{number}" for number in range(20)]
FOREVER = Tick(math.inf, lambda: 0.0, lambda: True)


class Functions:
    """Stands for gateway.catalog.functions.Functions. Answers come when as many are asked for as can be at once."""

    def __init__(self, together: int, failures: dict[str, Exception]) -> None:
        self.together, self.failures = together, failures
        self.asked = self.most = 0
        self.names: list[str] = []
        self._are_enough = asyncio.Event()

    async def choices(self, tenant: str, name: str, qualifier: str | None) -> list[Choice]:
        self.names.append(name)
        self.asked += 1
        self.most = max(self.most, self.asked)
        are_enough = self._are_enough
        if self.asked >= self.together or len(self.names) == len(KEYS):
            are_enough.set()
            self.asked, self._are_enough = 0, asyncio.Event()
        async with asyncio.timeout(10):
            await are_enough.wait()
        if name in self.failures:
            raise self.failures[name]
        return [Choice(1.0, Resolved(name, 1, DIGESTS[0], "key", (8,), 1000, Policy(), 2))]


async def found(functions: Functions, tick: Tick = FOREVER) -> list[tuple[str, list[str] | None]]:
    looked_up = look_up(functions, KEYS, tick)  # type: ignore[arg-type]
    return [(key, None if each is None else [c.version.function for c in each]) async for key, each in looked_up]


def test_some_are_looked_up_at_once_and_all_are_found() -> None:
    failures = {"f3": NoSuchFunction("t", "f3"), "f9": NotFound("no latest"), "f19": CorruptFunction("f19")}
    functions = Functions(lookups.AT_ONCE, failures)
    expected: list[tuple[str, list[str] | None]] = [(key, [key.removeprefix("t/")]) for key in KEYS]
    expected[3], expected[9], expected[19] = (KEYS[3], None), (KEYS[9], []), (KEYS[19], [])
    assert asyncio.run(found(functions)) == expected
    assert functions.most == lookups.AT_ONCE


def test_a_registry_that_is_away_is_said() -> None:
    with pytest.raises(StoreUnavailable):
        asyncio.run(found(Functions(1, {"f5": StoreUnavailable("away")})))


def test_the_end_of_the_turn_ends_it() -> None:
    functions = Functions(1, {})
    with pytest.raises(TickEnded):
        asyncio.run(found(functions, Tick(math.inf, lambda: 0.0, lambda: len(functions.names) < 10)))
    assert len(functions.names) < len(KEYS)
