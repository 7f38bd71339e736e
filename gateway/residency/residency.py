"""Predictive prefetch: counts calls, lets the leader forecast them, and orders nodes to have adapters ready.

every worker                  the leader
------------                  ----------
a call -> ArrivalCounter -+-> CallHistory -> Forecaster      each second
warm order -> ManualHolds-+      |
                               Plan <- WarmSchedules, StandingPolicies
                                 |                           each 2 s, and when nodes come or go
                                 |
                               ResidencyOrders -> POST /adapters/wanted
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from adapters.errors import StoreUnavailable
from adapters.standing import Memory
from cluster.messages import Adapter
from cluster.node_table import HOST, NodeTable
from cluster.residency import MAX_IDLE_TTLS
from cluster.state import ClusterState
from gateway.background import background
from gateway.catalog.adapters import adapter_of
from gateway.catalog.functions import Functions
from gateway.leader.tick import Job, Tick
from gateway.residency.arrivals import MAX_COUNTS_A_MESSAGE, Arrival, ArrivalCounter, CallsCounted, function_key
from gateway.residency.history import CallHistory, Forecast
from gateway.residency.lookups import choices_of
from gateway.residency.manual_holds import ManualHold, ManualHolds
from gateway.residency.messages import ForecastReply, LeftOut, WantedPlace
from gateway.residency.metrics import ResidencyMetrics
from gateway.residency.orders import NodeOrder, ResidencyOrders
from gateway.residency.plan import Plan, PlannedAdapter, PrewarmTarget
from gateway.residency.reports import ForecastAnswered, ForecastAsked, HeldAsked, Message
from gateway.residency.schedules import WarmSchedules
from gateway.residency.standing import StandingPolicies, memory_of
from gateway.usage.residents import Owners
from gateway.workers.channel import Channel

SECOND = 1.0
PLAN_SECONDS = 2.0
NODES_SECONDS = 0.5
"""Seconds between two checks for new or lost nodes. A change leads to a new plan at once, so that lost copies are soon
restored."""
TOGETHER_PLANNED = 64
"""Number of targets that are planned between two pauses that let the event loop run."""
MAX_LOOKUPS_A_TICK = 32
MAX_LOOKUP_SECONDS = 1.0


@dataclass(frozen=True)
class Parts:
    """Components that the leader uses."""

    history: CallHistory
    schedules: WarmSchedules
    standing: StandingPolicies
    owners: Owners
    orders: ResidencyOrders
    metrics: ResidencyMetrics


class Residency:
    """Prewarming in one gateway worker. `clock`: monotonic seconds. `unix`: Unix time."""

    def __init__(
        self,
        channel: Channel[Message],
        cluster: ClusterState,
        base: str,
        functions: Functions,
        parts: Parts,
        *,
        clock: Callable[[], float],
        unix: Callable[[], float],
    ) -> None:
        self._channel, self._cluster, self._base, self._functions = channel, cluster, base, functions
        self._parts, self._history = parts, parts.history
        self._clock, self._unix = clock, unix
        self._planned: frozenset[tuple[str, str]] = frozenset()
        """Id and epoch of the nodes in the last plan."""
        self._next_plan_at = -math.inf
        self.owners = parts.owners
        self._holds = ManualHolds(clock)
        self._changed: set[str] = set()
        """Changed functions with manual holds; they may have been deleted."""
        self._counter = ArrivalCounter()
        self._planned_by_node: Mapping[str, Sequence[PlannedAdapter]] = {}
        self._left_out: Mapping[str, list[LeftOut]] = {}
        self._since: dict[tuple[str, str], float] = {}
        """Unix time since which an adapter has been in the plan, by node and digest."""
        self.on_provisioned: Callable[[str, str], None] = lambda *_: None
        channel.on_message = self._receive

    def record_call(self, tenant: str, function: str, adapter: Adapter) -> None:
        """Counts a call of a function's version."""
        self._counter.record(tenant, function, adapter)

    def hold(self, want: ManualHold) -> None:
        """Stores a manual hold, here and on the other workers, so that it applies whichever worker leads."""
        self._holds.hold(want)
        self._channel.publish(want)

    def forget(self, tenant: str, function: str) -> None:
        """Forgets what was derived from a changed function's versions."""
        self._history.forget(tenant, function)
        self.owners.forget(tenant, function)
        if self._holds.has(tenant, function):
            self._changed.add(function_key(tenant, function))

    def provisioned(self) -> dict[str, dict[str, str]]:
        """Returns, by node id and digest, the tier in which the last orders provision the adapter."""
        return {
            node: {want.adapter.digest: want.provisioned for want in wants if want.provisioned is not None}
            for node, wants in self._planned_by_node.items()
        }

    async def provisionable(self) -> Memory:
        """Returns the limits of provisioned copies: the bytes of the nodes' memory that they may use, and their
        number."""
        return memory_of((node.record for node in await self._cluster.nodes()), self._base)

    async def forecast_of(self, tenant: str, function: str) -> ForecastReply:
        """Returns the leader's forecast of a function; an empty reply if no leader answers."""
        if self._history.observes:
            return self._reply(tenant, function)
        answer = await self._channel.ask(lambda number: ForecastAsked(number, tenant, function))
        return msgspec.json.decode(answer, type=ForecastReply) if answer is not None else ForecastReply(function)

    def jobs(self) -> list[Job]:
        """Returns the leader's jobs."""
        return [
            Job("forecast", self._observe, SECOND, "nodes"),
            self._parts.schedules.job(),
            self._parts.standing.job(),
            Job("residency", self._check_nodes, NODES_SECONDS, "nodes"),
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reports calls to the leader, and forgets orders of deleted functions, as long as the context lasts."""
        async with self._channel.running(), background(self._each_second):
            yield

    async def _each_second(self) -> None:
        while True:
            await asyncio.sleep(SECOND)
            await self._forget_deleted()
            arrivals = self._counter.take()
            if self._history.observes:
                self._count(arrivals)
            elif self._channel.is_up:
                for first in range(0, len(arrivals), MAX_COUNTS_A_MESSAGE):
                    self._channel.publish(CallsCounted(arrivals[first : first + MAX_COUNTS_A_MESSAGE]))

    async def _forget_deleted(self) -> None:
        """Forgets manual holds of deleted functions. While the registry is unavailable, the lookup is repeated."""
        with suppress(StoreUnavailable):
            for key in list(self._changed):
                if await choices_of(self._functions, key) is None:
                    self._holds.forget(*key.split("/"))
                self._changed.discard(key)

    def _count(self, arrivals: Sequence[Arrival]) -> None:
        """Adds counted calls. Does nothing on a worker that is not the leader."""
        self._history.count(arrivals)
        for arrival in arrivals if self._history.observes else ():
            self.owners.record(arrival.tenant, arrival.function, arrival.adapter.digest)

    def _receive(self, message: Message) -> None:
        match message:
            case CallsCounted(arrivals):
                self._count(arrivals)
            case ManualHold():
                self._holds.hold(message)
            case HeldAsked():
                for want in self._holds.now():
                    self._channel.publish(want)
            case ForecastAsked(number, tenant, function):
                if self._history.observes:
                    reply = msgspec.json.encode(self._reply(tenant, function))
                    self._channel.publish(ForecastAnswered(number, reply))
            case ForecastAnswered(number, reply):
                self._channel.answer(number, reply)

    async def _observe(self, tick: Tick) -> None:
        if not self._history.observes:
            self._channel.publish(HeldAsked())
        await self._history.observe()
        tick.work += 1

    async def _check_nodes(self, tick: Tick) -> None:
        table, now = await self._cluster.table(), self._clock()
        records = [table.record(row) for row in table.serving(self._base).rows.tolist()]
        nodes = frozenset((record.id, record.epoch) for record in records)
        if self._parts.standing.has_read and (nodes != self._planned or now >= self._next_plan_at):
            self._planned, self._next_plan_at = nodes, now + PLAN_SECONDS
            await self._order(tick)

    async def _order(self, tick: Tick) -> None:
        forecast = await self._history.forecast()
        await self._resolve([likely.key for likely in forecast.likely])
        plan = Plan(await self._cluster.table(), self._base)
        for number, wish in enumerate(self._wishes(forecast)):
            plan.add(wish)
            tenant, _, function = wish.key.partition("/")
            self.owners.record(tenant, function, wish.adapter.digest)
            if wish.cause == "provisioned":
                self.on_provisioned(tenant, wish.adapter.digest)
            if number % TOGETHER_PLANNED == 0:
                await asyncio.sleep(0)
                tick.check()
        self._record(plan, forecast)
        idle = self._idle_ttls(await self._cluster.table())
        orders = {
            node: NodeOrder(tuple(want.message() for want in wants), idle.get(node, {}))
            for node, wants in self._planned_by_node.items()
        }
        await self._parts.orders.send(tick, plan.nodes, orders)

    def _idle_ttls(self, nodes: NodeTable) -> dict[str, dict[str, float]]:
        """Returns the idle limits (seconds) of the adapters in nodes' memory, by node and digest."""
        by_node: dict[str, dict[str, float]] = {}
        for digest, seconds in self._parts.standing.idle_ttls.items():
            for row, tier in nodes.tiers(digest).items():
                limits = by_node.setdefault(nodes.ids[row] or "", {})
                if tier <= HOST and len(limits) < MAX_IDLE_TTLS:
                    limits[digest] = seconds
        return by_node

    async def _resolve(self, keys: Sequence[str]) -> None:
        """Looks up the versions of the functions `keys` whose versions are unknown. What takes longer than
        MAX_LOOKUP_SECONDS is left to the next tick."""
        unknown = [key for key in keys if self._history.versions(key) is None][:MAX_LOOKUPS_A_TICK]

        async def resolve(key: str) -> None:
            choices = await choices_of(self._functions, key) or ()
            self._history.learn(key, [(adapter_of(each.version), each.share) for each in choices if each.is_whole])

        with suppress(TimeoutError, StoreUnavailable):
            async with asyncio.timeout(MAX_LOOKUP_SECONDS):
                await asyncio.gather(*map(resolve, unknown))

    def _wishes(self, forecast: Forecast) -> Iterator[PrewarmTarget]:
        """Yields the targets of a plan in order of importance.

        Provisioned copies come first, then manual orders, the latest first, then schedules, then forecasts, the most
        likely first. There are no forecasts for functions whose policy turns prefetch off. There are none for adapters
        with an idle limit either, because idle adapters must be evicted.
        """
        yield from self._parts.standing.wishes
        for hold in reversed(self._holds.now()):
            key = function_key(hold.tenant, hold.function)
            yield PrewarmTarget(key, hold.adapter, "order", 1.0, hold.tier, node=hold.node)
        yield from self._parts.schedules.wishes
        for likely in forecast.likely:
            if likely.key in self._parts.standing.not_prefetched:
                continue
            for adapter, share in self._history.versions(likely.key) or ():
                if adapter.digest in self._parts.standing.idle_ttls:
                    continue
                yield PrewarmTarget(likely.key, adapter, "forecast", 1.0 - (1.0 - likely.chance) ** share)

    def _record(self, plan: Plan, forecast: Forecast) -> None:
        now, since, wants = self._unix(), self._since, plan.wants()
        all_wants = [(node, want) for node, each in wants.items() for want in each]
        self._since = {(node, w.adapter.digest): since.get((node, w.adapter.digest), now) for node, w in all_wants}
        self._planned_by_node, self._left_out = wants, plan.left_out
        self._parts.metrics.set_wanted(Counter(cause for _, want in all_wants for cause in want.causes.values()))
        self._parts.metrics.set_left_out(Counter(each.cause for of in plan.left_out.values() for each in of))
        self._parts.metrics.set_error(forecast.error)

    def _reply(self, tenant: str, function: str) -> ForecastReply:
        key = function_key(tenant, function)
        chances = self._history.latest.chances.get(key)
        places = [
            WantedPlace(node, want.adapter.digest, want.tier, cause, self._since[node, want.adapter.digest])
            for node, wants in self._planned_by_node.items()
            for want in wants
            if (cause := want.causes.get(key)) is not None
        ]
        return ForecastReply(
            function=function,
            watched=round(self._history.watched, 1),
            chances=None if chances is None else {name: round(chance, 4) for name, chance in chances._asdict().items()},
            error={name: round(score, 4) for name, score in self._history.latest.error.items()},
            wanted=places,
            left_out=self._left_out.get(key, []),
        )
