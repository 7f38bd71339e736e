"""Loads versions of functions on nodes immediately, on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import NamedTuple

from adapters.choices import pick
from cluster.errors import ServiceError
from cluster.news import NodeRecord
from cluster.node_table import ABSENT, DEVICE, DISK, HOST, TIERS, NodeTable
from cluster.residency import HeldTier, Moved, PrefetchOrder
from cluster.state import ClusterState
from gateway.calls.late_nodes import LateNodes
from gateway.calls.node_calls import NodeCalls
from gateway.catalog.adapters import adapter_of
from gateway.catalog.functions import Functions
from gateway.residency.manual_holds import ManualHold
from gateway.residency.messages import Tier, Version, WarmOrder, WarmPlace, WarmReply
from gateway.residency.plan import node_memory
from gateway.scheduling.home_nodes import HomeNodes
from gateway.scheduling.route import RETRY_AFTER, why_none

MAX_UNDERWAY = 256
MAX_TENANT_UNDERWAY = 32
ANSWER_SECONDS = 2.0
"""Seconds for which a caller waits for the nodes' answers. Loads that take longer continue without it."""
REORDER_PAUSE_S = 60.0
LOOK_SECONDS = 0.2
"""Seconds between the first two checks while a caller waits. The pause then doubles, up to MAX_LOOK_SECONDS."""
MAX_LOOK_SECONDS = 2.0
NAMES: Mapping[int, HeldTier] = {DEVICE: "device", HOST: "host", DISK: "disk", ABSENT: "absent"}

Key = tuple[str, str, str]
Place = tuple[Version, NodeRecord]


class _Load(NamedTuple):
    """Order of this worker to a node to load an adapter."""

    tenant: str
    answer: asyncio.Task[Moved]
    until: float
    """Time, in monotonic seconds, until which the same load is not ordered again."""


class Warming:
    """Warming by one gateway worker. `hold` is called with each adapter that must stay wanted."""

    def __init__(
        self,
        cluster: ClusterState,
        base: str,
        functions: Functions,
        node_calls: NodeCalls,
        late_nodes: LateNodes,
        *,
        hold: Callable[[ManualHold], None],
    ) -> None:
        self._cluster, self._base, self._functions, self._node_calls = cluster, base, functions, node_calls
        self._late_nodes, self._hold = late_nodes, hold
        self._loads: dict[Key, _Load] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Stops waiting for nodes' answers at the end of the context. Nodes still complete the ordered loads."""
        try:
            yield
        finally:
            for load in self._loads.values():
                load.answer.cancel()

    async def versions(self, tenant: str, name: str, qualifier: str | None) -> list[Version]:
        """Returns the versions that calls of the function use with this qualifier. Raises the exceptions of
        Functions.target."""
        resolved = [pick([choice], 0.0) for choice in await self._functions.choices(tenant, name, qualifier)]
        return [Version(each.version, adapter_of(each)) for each in resolved]

    async def warm(self, order: WarmOrder) -> WarmReply:
        """Makes nodes load the adapters that they lack, and waits at most ANSWER_SECONDS. Returns the state of each
        version on each node.

        Raises ServiceError: `unavailable` without nodes, `rate_limited` for too many loads, `conflict` if no node's
        host memory can be used, and the nodes' own error if all of them refuse.
        """
        places = await self._places(order)
        reply = await self._bring(order, places)
        for version, node in places:
            self._hold(ManualHold(order.tenant, order.function, version.adapter, node.id, order.tier))
        return reply

    async def _places(self, order: WarmOrder) -> list[Place]:
        nodes = await self._cluster.table()
        homes = HomeNodes(nodes, self._base)
        if not len(homes) and await self._late_nodes.find():
            nodes = await self._cluster.table()
            homes = HomeNodes(nodes, self._base)
        places: list[Place] = []
        for version in order.versions:
            rows = homes.of(version.adapter.digest, order.copies, version.adapter.max_rank)
            if not rows:
                why = why_none(nodes, self._base, version.adapter.max_rank)
                raise ServiceError("unavailable", why, retry_after=RETRY_AFTER)
            places += [(version, nodes.record(row)) for row in rows]
        return places

    async def _bring(self, order: WarmOrder, places: Sequence[Place]) -> WarmReply:
        answers = self._load(order, await self._cluster.table(), places)
        if answers:
            await asyncio.wait(answers.values(), timeout=ANSWER_SECONDS)
        _raise_refusal(answers.values(), len(places))
        nodes = await self._cluster.table()
        warmed = [_place(nodes, place, answers, order.tier) for place in places]
        if order.tier == "host" and all(place.error for place in warmed):
            raise ServiceError("conflict", warmed[0].error or "")
        return _reply(order, warmed)

    async def until_warm(self, order: WarmOrder, seconds: float) -> str | None:
        """Waits until all ordered adapters are loaded, at most `seconds` seconds. Returns a text that says which are
        still not loaded; None if all are."""
        end, problem, pause = monotonic() + seconds, None, LOOK_SECONDS
        while True:
            try:
                reply = await self._bring(order, await self._places(order))
                problem = next((place.error for place in reply.places if place.error), None)
            except ServiceError as error:
                if error.type == "too_large":  # permanent
                    return error.message
                problem = error.message
            else:
                if reply.ready:
                    return None
            if monotonic() >= end:
                return problem or f"it was still on its way after {seconds:g} s"
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_LOOK_SECONDS)

    def _load(self, order: WarmOrder, nodes: NodeTable, places: Sequence[Place]) -> dict[Key, asyncio.Task[Moved]]:
        """Orders nodes to load the adapters that are not on their devices yet. Returns a task per adapter, whose result
        is the node's answer.

        Raises ServiceError `rate_limited` for too many loads.
        """
        if order.tier != "device":
            return {}  # nodes accept no load orders for host memory; they load held adapters by themselves
        now = monotonic()
        self._loads = {key: load for key, load in self._loads.items() if not load.answer.done() or now < load.until}
        missing = [(v, node) for v, node in places if _tier(nodes, v, node) != "device"]
        started = {_key(v, node): (v, node) for v, node in missing if _key(v, node) not in self._loads}
        of_tenant = sum(load.tenant == order.tenant for load in self._loads.values())
        if of_tenant + len(started) > MAX_TENANT_UNDERWAY or len(self._loads) + len(started) > MAX_UNDERWAY:
            raise ServiceError("rate_limited", "too many adapters are being warmed; try again", retry_after=RETRY_AFTER)
        for key, (version, node) in started.items():
            answer = asyncio.create_task(self._ask(node, PrefetchOrder(version.adapter, tenant=order.tenant)))
            answer.add_done_callback(partial(self._end, key))
            self._loads[key] = _Load(order.tenant, answer, now + REORDER_PAUSE_S)
        return {_key(v, node): self._loads[_key(v, node)].answer for v, node in missing}

    async def _ask(self, node: NodeRecord, order: PrefetchOrder) -> Moved:
        """Asks a node to load the adapter. Returns the node's answer. Raises ServiceError."""
        return (await self._node_calls.ask(node, "/adapters/prefetch", Moved, order))[1]

    def _end(self, key: Key, answer: asyncio.Task[Moved]) -> None:
        """Forgets a load that has ended. A load in progress is remembered, so that it is not ordered again."""
        if answer.cancelled() or answer.exception() is not None or answer.result().tier is not None:
            self._loads.pop(key, None)


def _key(version: Version, node: NodeRecord) -> Key:
    return node.id, node.epoch, version.adapter.digest


def _tier(nodes: NodeTable, version: Version, node: NodeRecord) -> HeldTier:
    row = nodes.row(node.id)
    return NAMES[ABSENT if row is None else nodes.tiers(version.adapter.digest).get(row, ABSENT)]


def _raise_refusal(answers: Iterable[asyncio.Task[Moved]], places: int) -> None:
    """Raises the first error of a node if all nodes failed."""
    ended = (answer for answer in answers if answer.done() and not answer.cancelled())
    failures = [failure for answer in ended if (failure := answer.exception()) is not None]
    if len(failures) == places:
        raise failures[0]


def _place(nodes: NodeTable, place: Place, answers: Mapping[Key, asyncio.Task[Moved]], target_tier: Tier) -> WarmPlace:
    version, node = place
    tier, answer = _tier(nodes, version, node), answers.get(_key(version, node))
    if target_tier == "host":
        never = None if tier in ("device", "host") else node_memory(node).why_never(version.adapter, "host")
        return WarmPlace(version.number, node.id, tier, never)
    if answer is None or not answer.done() or answer.cancelled():
        return WarmPlace(version.number, node.id, tier)
    if (failure := answer.exception()) is not None:
        return WarmPlace(version.number, node.id, tier, failure.message if isinstance(failure, ServiceError) else "")
    return WarmPlace(version.number, node.id, answer.result().tier or tier)


def _reply(order: WarmOrder, places: list[WarmPlace]) -> WarmReply:
    good = [tier for tier, number in TIERS.items() if number <= TIERS[order.tier]]
    return WarmReply(order.function, order.tier, all(place.tier in good for place in places), places)
