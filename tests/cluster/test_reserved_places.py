"""Places that are kept for functions of a tenant, in memory and in Redis, against counts of who runs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from limit_workers import limits_of, two_workers
from worlds import World

from cluster.limits import Call, Owner

LIMIT = 10
KEPT = {"f": 3, "g": 4}
FUNCTIONS = ("f", "g", "h", "i")


def call(function: str, places: int = 1) -> Call:
    """As gateway.calls.admission makes it."""
    owners = (Owner("t", LIMIT), Owner(f"t/{function}", None))
    others = tuple(Owner(f"t/{other}", kept) for other, kept in KEPT.items() if other != function)
    return Call("t", None, 0, places, owners, KEPT.get(function, 0), others)


def may_run(running: Counter[str], function: str, places: int) -> bool:
    """The tenant has LIMIT places, and a function beyond those kept for it leaves what is free of the others'."""
    total = running.total() + places
    if running[function] + places <= KEPT.get(function, 0):
        return total <= LIMIT
    return total + sum(max(0, KEPT[other] - running[other]) for other in KEPT if other != function) <= LIMIT


@pytest.mark.parametrize("seed", range(3))
def test_drawn_calls_run_as_counts_say(world: World, seed: int) -> None:
    async def main() -> None:
        rng, running, calls = random.Random(seed), Counter[str](), list[tuple[str, Call]]()
        refused = 0
        async with limits_of(world) as limits:
            for _ in range(150):
                if calls and rng.random() < 0.45:
                    function, ended = calls.pop(rng.randrange(len(calls)))
                    await limits.settle(ended, 0)
                    running[function] -= ended.places
                    continue
                function, places = rng.choice(FUNCTIONS), rng.choice([1, 1, 2])
                asked = call(function, places)
                refusal = await limits.take(asked)
                assert (refusal is None) == may_run(running, function, places), (running, function, places)
                if refusal is None:
                    calls.append((function, asked))
                    running[function] += places
                else:
                    refused += 1
                    assert refusal.owner == Owner("t", LIMIT)
            for _, ended in calls:
                await limits.settle(ended, 0)
        assert refused > 10

    asyncio.run(main())


def test_a_flood_on_one_worker_leaves_places_on_the_other(world: World) -> None:
    if world.server is None:
        pytest.skip("one process has no other")

    async def main() -> None:
        async with two_workers(world) as ((_, one), (_, other)):
            flood = [await one.take(call("h")) for _ in range(LIMIT)]
            assert flood.count(None) == LIMIT - sum(KEPT.values())
            assert [await other.take(call("f")) for _ in range(KEPT["f"])] == [None] * KEPT["f"]
            beyond = await other.take(call("f"))
            assert beyond is not None and beyond.why == "places", "the rest is kept for g"
            assert [await one.take(call("g")) for _ in range(KEPT["g"])] == [None] * KEPT["g"]
            for _ in range(flood.count(None)):
                await one.settle(call("h"), 0)
            assert await other.take(call("f")) is None, "what nobody keeps is for all"

    asyncio.run(main())
