"""The leader's ticks with stand-ins for what is around it: what hangs, what is asked, what another worker says."""

from __future__ import annotations

import asyncio
import math
import time
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from numbered_adapters import DIGESTS, adapter
from prometheus_client import CollectorRegistry
from scheduling_world import node, table_of
from test_history import Given

from adapters.choices import Choice, Resolved
from adapters.functions import Policy
from gateway.leader.tick import Tick, TickEnded
from gateway.residency import history, residency
from gateway.residency.arrivals import Arrival
from gateway.residency.history import CallHistory
from gateway.residency.manual_holds import ManualHold
from gateway.residency.metrics import ResidencyMetrics
from gateway.residency.orders import ResidencyOrders
from gateway.residency.plan import TENANT_WANTED, PrewarmTarget
from gateway.residency.reports import make_channel
from gateway.residency.residency import Parts, Residency
from gateway.usage.residents import Owners


class Functions:
    """Stands for gateway.catalog.functions.Functions: of `slow` it never knows anything."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def choices(self, tenant: str, name: str, qualifier: str | None) -> list[Choice]:
        assert (tenant, qualifier) == ("t", None)
        self.asked.append(name)
        if name == "slow":
            await asyncio.sleep(3600)
        return [Choice(1.0, Resolved(name, 1, DIGESTS[7], "key", (8,), 1000, Policy(), 2))]


class World:
    def __init__(self, chances: dict[str, float], wishes: list[PrewarmTarget]) -> None:
        self.told: dict[str, list[str]] = {}
        self.functions, metrics = Functions(), ResidencyMetrics(CollectorRegistry())
        calls = CallHistory(lambda: Given(chances), time.monotonic, time.time)
        self.parts = Parts(
            history=calls,
            schedules=SimpleNamespace(wishes=wishes),  # type: ignore[arg-type]
            standing=SimpleNamespace(wishes=[], idle_ttls={}, not_prefetched=frozenset()),  # type: ignore[arg-type]
            owners=Owners(),
            orders=ResidencyOrders(SimpleNamespace(order=self.order), metrics, time.monotonic),  # type: ignore[arg-type]
            metrics=metrics,
        )
        table = table_of(node("n"), node("m"))
        cluster = SimpleNamespace(table=lambda: asyncio.sleep(0, table))
        self.residency = Residency(
            make_channel(None), cluster, "b", self.functions, self.parts, clock=time.monotonic, unix=time.time  # type: ignore[arg-type]
        )  # fmt: skip

    async def order(self, node: Any, path: str, order: Any) -> None:
        assert path == "/adapters/wanted"
        self.told[node.id] = [each.adapter.digest for each in order.adapters]

    async def tick(self, deadline: float = math.inf) -> None:
        await self.residency._order(Tick(deadline, time.monotonic, lambda: True))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(residency, "MAX_LOOKUP_SECONDS", 0.05)


def test_what_takes_long_to_look_up_holds_up_nothing() -> None:
    async def main() -> None:
        world = World(
            {"t/slow": 0.9, "t/changed": 0.8, "t/called": 0.7}, [PrewarmTarget("u/f", adapter(1), "schedule", 1.0)]
        )
        await world.parts.history.observe()
        world.parts.history.count([Arrival("t", "called", adapter(0), 1)])
        await asyncio.wait_for(world.tick(), 60)
        assert sorted(chain.from_iterable(world.told.values())) == sorted([DIGESTS[0], DIGESTS[1], DIGESTS[7]])
        assert sorted(world.functions.asked) == ["changed", "slow"], "what was called needs no look"
        world.residency.forget("t", "called")
        await world.tick()
        assert sorted(world.functions.asked) == ["called", "changed", "slow", "slow"]
        with pytest.raises(TickEnded):
            await world.tick(deadline=-1.0)

    asyncio.run(main())


def test_of_a_tenants_orders_the_latest_are_carried_out() -> None:
    """It may order more than a node is asked to have for one tenant."""

    async def main() -> None:
        world = World({}, [])
        await world.parts.history.observe()
        count = TENANT_WANTED + 5
        for number in range(count):
            world.residency.hold(ManualHold("t", f"f{number}", adapter(number), "n", "device"))
        await world.tick()
        assert set(world.told["n"]) == {DIGESTS[number] for number in range(5, count)}
        world.residency.hold(ManualHold("t", "f0", adapter(0), "n", "device"))
        await world.tick()
        assert set(world.told["n"]) == {DIGESTS[number] for number in (0, *range(6, count))}

    asyncio.run(main())


def test_nothing_is_forecast_of_adapters_with_an_idle_limit() -> None:
    async def main() -> None:
        world = World({"t/f": 0.9, "t/g": 0.9}, [PrewarmTarget("t/f", adapter(1), "schedule", 1.0)])
        await world.parts.history.observe()
        world.parts.history.count([Arrival("t", "f", adapter(0), 1), Arrival("t", "g", adapter(2), 1)])
        world.parts.standing.idle_ttls = {DIGESTS[0]: 5.0, DIGESTS[1]: 5.0}
        await world.tick()
        assert sorted(chain.from_iterable(world.told.values())) == sorted([DIGESTS[1], DIGESTS[2]])

    asyncio.run(main())


def test_a_function_that_is_not_prefetched_is_there_by_its_schedule_alone() -> None:
    """Another function of the same adapter is prefetched as ever."""

    async def main() -> None:
        world = World({"t/f": 0.9, "t/g": 0.9, "u/h": 0.9}, [PrewarmTarget("t/g", adapter(1), "schedule", 1.0)])
        await world.parts.history.observe()
        calls = [("t", "f", 0), ("t", "g", 1), ("u", "h", 2)]
        world.parts.history.count([Arrival(tenant, name, adapter(number), 1) for tenant, name, number in calls])
        world.parts.standing.not_prefetched = frozenset({"t/f", "t/g"})
        await world.tick()
        assert sorted(chain.from_iterable(world.told.values())) == sorted([DIGESTS[1], DIGESTS[2]])
        world.parts.history.count([Arrival("u", "h", adapter(0), 1)])
        await world.tick()
        assert DIGESTS[0] in chain.from_iterable(world.told.values())
        assert (await world.residency.forecast_of("t", "f")).wanted == []

    asyncio.run(main())


def test_what_is_said_of_a_function_is_its_own() -> None:
    async def main() -> None:
        wishes = [
            PrewarmTarget("t/f", adapter(0), "schedule", 1.0, copies=2),
            PrewarmTarget("u/f", adapter(0), "schedule", 1.0),
        ]
        world = World({"t/f": 0.9, "u/g": 0.9}, wishes)
        unknown = await world.residency.forecast_of("t", "f")
        assert (unknown.watched, unknown.chances, unknown.wanted) == (None, None, [])
        await world.parts.history.observe()
        world.parts.history.count([Arrival("u", "g", adapter(3), 1)])
        await world.tick()
        own = await world.residency.forecast_of("t", "f")
        places = [(place.digest, place.cause) for place in own.wanted]
        assert sorted(places) == sorted([(DIGESTS[0], "schedule"), (DIGESTS[0], "schedule"), (DIGESTS[7], "forecast")])
        assert own.chances is not None
        other = await world.residency.forecast_of("u", "g")
        assert [(place.digest, place.cause) for place in other.wanted] == [(DIGESTS[3], "forecast")]
        since = other.wanted[0].since
        await world.tick()
        assert (await world.residency.forecast_of("u", "g")).wanted[0].since == since
        nobody = await world.residency.forecast_of("t", "g")
        assert (nobody.chances, nobody.wanted) == (None, [])
        assert msgspec.json.decode(msgspec.json.encode(own), type=type(own)) == own

    asyncio.run(main())
