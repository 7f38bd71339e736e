"""When nodes are told what to have ready: when it changed, in time, and never those that do not understand."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import msgspec
import pytest
from numbered_adapters import adapter
from prometheus_client import CollectorRegistry

from cluster.errors import ServiceError
from cluster.news import NodeRecord
from cluster.residency import WantedAdapter, WantedResidency
from gateway.leader.tick import Tick, TickEnded
from gateway.residency import orders as orders_module
from gateway.residency.metrics import ResidencyMetrics
from gateway.residency.orders import ORDER_SECONDS, NodeOrder, ResidencyOrders

NODE = NodeRecord(
    id="n", epoch="1", seq=1, url="http://n", state="ready", base="b", base_id="b", max_context=1, running=0, queued=0,
    queue_limit=1, kv_blocks=1, kv_blocks_free=1, block_tokens=1,
)  # fmt: skip
WANTED = [WantedAdapter(adapter(0), "device", 0.5)]


class Nodes:
    """Stands for gateway.calls.node_calls.NodeCalls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.failure: Exception | None = None
        self.hang = self.at_once = self.most = 0

    async def order(self, node: NodeRecord, path: str, order: WantedResidency) -> None:
        assert (path, order.seconds) == ("/adapters/wanted", ORDER_SECONDS)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.hang)
        finally:
            self.at_once -= 1
        self.told.append((node.id, len(order.adapters)))
        if self.failure is not None:
            raise self.failure


class World:
    def __init__(self) -> None:
        self.now, self.nodes, self.registry = 0.0, Nodes(), CollectorRegistry()
        self.orders = ResidencyOrders(self.nodes, ResidencyMetrics(self.registry), lambda: self.now)  # type: ignore[arg-type]

    def send(self, wanted: list[WantedAdapter], *nodes: NodeRecord, deadline: float = 1e9) -> list[tuple[str, int]]:
        """Returns what nodes were told."""
        self.nodes.told = []
        tick = Tick(deadline, lambda: self.now, lambda: True)
        targets = nodes or (NODE,)
        asyncio.run(self.orders.send(tick, targets, {node.id: NodeOrder(tuple(wanted)) for node in targets}))
        return self.nodes.told


def test_a_node_is_told_what_changed_and_again_before_it_ends() -> None:
    world = World()
    assert world.send([]) == [], "there is nothing to take back"
    assert world.send(WANTED) == [("n", 1)]
    assert world.send(list(WANTED)) == []
    world.now += ORDER_SECONDS / 2
    assert world.send(WANTED) == [("n", 1)]
    assert world.send(WANTED * 2) == [("n", 2)]
    assert world.send([]) == [("n", 0)]
    world.now += ORDER_SECONDS
    assert world.send([]) == []
    assert world.send(WANTED) == [("n", 1)]
    assert world.send(WANTED, msgspec.structs.replace(NODE, epoch="2")) == [("n", 1)], "a node that was started again"


@pytest.mark.parametrize("failure", [ServiceError("node_failed", "gone"), TimeoutError()])
def test_a_failure_is_logged_once_and_tried_again(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world = World()
    world.nodes.failure = failure
    for _ in range(3):
        assert world.send(WANTED) == [("n", 1)]
    assert len(caplog.records) == 1
    world.nodes.failure = None
    assert (world.send(WANTED), world.send(WANTED)) == ([("n", 1)], [])
    world.nodes.failure = failure
    world.send(WANTED * 2)
    assert len(caplog.records) == 2


def test_hanging_nodes_keep_no_order_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty nodes take the connection and never answer: a changed order still reaches the ninth at once, in each
    tick."""
    monkeypatch.setattr(orders_module, "ANSWER_SECONDS", 0.05)
    world, good = World(), msgspec.structs.replace(NODE, id="good")
    world.send(WANTED, good)
    hanging = [msgspec.structs.replace(NODE, id=f"h{number}") for number in range(80)]
    hung: list[str] = []

    async def order(node: NodeRecord, path: str, message: WantedResidency) -> None:
        if node.id == "good":
            world.nodes.told.append((node.id, len(hung)))
            return
        hung.append(node.id)
        world.now += 0.05 / orders_module.FAILING_AT_ONCE
        await asyncio.sleep(3600)

    world.nodes.order = order  # type: ignore[method-assign]
    tried = Counter[str]()
    for tick in range(1, 60):
        hung.clear()
        [(_, before)] = world.send([*WANTED] * (1 + tick % 2), *hanging, good)
        assert before <= orders_module.AT_ONCE, "it waits for none of them"
        tried.update(hung)
        if tick > 1:
            assert len(hung) <= 4 * orders_module.FAILING_AT_ONCE, "and the tick ends soon"
    assert set(tried) == {node.id for node in hanging}, "each has its turn"
    assert max(tried.values()) - min(tried.values()) <= 2


def test_orders_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "ANSWER_SECONDS", 0.05)
    world = World()
    many = [msgspec.structs.replace(NODE, id=f"n{number}") for number in range(40)]
    world.nodes.hang = 3600
    assert world.send(WANTED, *many) == []
    assert world.nodes.most == orders_module.AT_ONCE
    world.nodes.hang = 0
    ended: Any = None
    with pytest.raises(TickEnded):
        ended = world.send(WANTED, *many, deadline=-1.0)
    assert (ended, world.nodes.told) == (None, [])
    assert len(world.send(WANTED, *many)) == 40
