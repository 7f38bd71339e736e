"""A node whose passes take other than its model says for a minute refuses nobody, until they do what it says again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from scheduling_world import ask, chosen, node, table_of

from cluster.model_check import OFF
from cluster.node_table import NodeTable
from gateway.scheduling.decision import take_snapshot
from gateway.scheduling.rank_aware import CHECK_EVERY_S, PATIENCE_S, RankAware, Widening
from tests.support.listed_record import put_record

FULL = node("full", *[8] * 32, tier="device", queued=50)
STRICT = ask(ttft=0.1, slo_class="strict")


class World:
    """Nodes by their ratios, at a time."""

    def __init__(self, **ratios: float | None) -> None:
        self.now = 0.0
        self.nodes = NodeTable(4)
        self.widening = Widening(lambda: self.now)
        self.tell(**ratios)

    def tell(self, **ratios: float | None) -> None:
        for name, ratio in ratios.items():
            put_record(self.nodes, msgspec.structs.replace(node(name), forecast_ratio=ratio))

    def widened(self, after: float) -> list[str | None]:
        self.now += after
        self.widening.update(self.nodes)
        rows = np.array(list(self.nodes.rows()))
        return [self.nodes.ids[row] for row in rows[self.widening.widened(self.nodes, rows)]]


@pytest.mark.parametrize("ratio", [OFF + 0.01, 1 / OFF - 0.01])
def test_a_model_that_is_off_for_a_minute_is_widened_until_it_is_right(ratio: float) -> None:
    world = World(off=ratio, right=1.0, edge=OFF, unknown=None)
    assert world.widened(0.0) == []
    assert world.widened(PATIENCE_S - CHECK_EVERY_S) == []
    assert world.widened(CHECK_EVERY_S) == ["off"]
    world.tell(off=OFF)
    assert world.widened(CHECK_EVERY_S / 2) == ["off"], "nodes are not looked at more often"
    assert world.widened(CHECK_EVERY_S / 2) == []
    world.tell(off=ratio)
    assert world.widened(CHECK_EVERY_S) == [], "a new minute begins"
    assert world.widened(PATIENCE_S) == ["off"]


def test_a_minute_with_a_break_is_none() -> None:
    world = World(off=2.0)
    world.widened(0.0)
    world.tell(off=1.0)
    world.widened(PATIENCE_S / 2)
    world.tell(off=2.0)
    assert world.widened(PATIENCE_S / 2) == []


def test_a_node_that_left_is_forgotten() -> None:
    world = World(off=2.0)
    assert world.widened(0.0) == world.widened(PATIENCE_S / 2) == []
    world.nodes.remove("off")
    world.widened(CHECK_EVERY_S)
    world.tell(off=2.0)
    assert world.widened(PATIENCE_S / 2) == []


def test_what_a_widened_node_forecasts_refuses_nobody() -> None:
    """And of the nodes that all break the promise, the one that may not is taken."""
    now = 0.0
    policy = RankAware(lambda: now)
    busier = msgspec.structs.replace(FULL, id="busier", queued=60, forecast_ratio=0.5)
    nodes = table_of(FULL, busier)
    assert chosen(policy, nodes, STRICT) is None
    now += PATIENCE_S
    assert chosen(policy, nodes, STRICT) == "busier"
    told = take_snapshot(nodes, np.arange(2), STRICT, 1, policy.last).candidates(STRICT)
    assert {each.node: each.widened for each in told} == {"full": False, "busier": True}
    put_record(nodes, msgspec.structs.replace(busier, forecast_ratio=1.0))
    now += CHECK_EVERY_S
    assert chosen(policy, nodes, STRICT) is None
