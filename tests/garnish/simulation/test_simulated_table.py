"""What the simulator tells the table in short is what whole records would say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from simulated import CACHED, PROFILE
from test_simulated_node import JOBS, jobs_of

from cluster.news import RECORD_INTERVAL
from cluster.node_table import COLUMNS, Demand, NodeTable
from garnish.simulation.columns import SimulatedTable, record_of, residents_of
from garnish.simulation.node import SimulatedNode
from garnish.simulation.profile import NodeProfile, load_profile, profile_names
from garnish.simulation.simulator import Simulator
from gateway.scheduling.baselines import MostIdle


class Checked(SimulatedTable):
    """Compares itself with a table that is put whole records into."""

    def __init__(self, nodes: list[SimulatedNode]) -> None:
        self._whole = NodeTable(len(nodes))
        self._seq = 0
        self.checks = 0
        super().__init__(nodes)
        for node in nodes:
            self._whole.put(record_of(node, 0.0, 0), 0.0, residents=residents_of(node))

    def reserve(self, row: int, request_id: str, demand: Demand) -> None:
        super().reserve(row, request_id, demand)
        self._whole.reserve(row, request_id, demand)
        self._compare()

    def receive(self, node: SimulatedNode, now: float) -> None:
        self._seq += 1
        record, acknowledged = record_of(node, now, self._seq), list(node.acknowledged)
        self._whole.put(record, now, residents=residents_of(node), acknowledged=acknowledged)
        super().receive(node, now)
        self._compare()

    def _compare(self) -> None:
        self.checks += 1
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(self, name), getattr(self._whole, name), name)
        for digest in ("a", "b"):
            assert self.users(digest) == self._whole.users(digest)
            if not self._residents.everywhere:
                assert self.tiers(digest) == self._whole.tiers(digest)


@pytest.mark.parametrize("profile", [PROFILE, CACHED], ids=["loads", "cached"])
@given(drawn=JOBS)
def test_short_and_whole_records_say_the_same(profile: NodeProfile, drawn: list) -> None:
    jobs = jobs_of(drawn)
    simulator = Simulator(profile, 2, lambda _: MostIdle(), jobs)
    simulator.table = checked = Checked(simulator.nodes)
    simulator.run()
    assert checked.checks > len(jobs)
    left = {int(name) for row in range(2) for name in checked.reservations(row)}
    late = {found.number for found in jobs if found.at > simulator.now - RECORD_INTERVAL - 0.001}
    assert left <= late, "every reservation is acknowledged with the next record"


def test_adapters_that_are_everywhere() -> None:
    simulator = Simulator(CACHED, 3, lambda _: MostIdle(), [])
    assert simulator.table.tiers("any") == {0: 0, 1: 0, 2: 0}


def test_committed_profiles_are_reckoned_with() -> None:
    """And not the model that is assumed of nodes which were never measured."""
    names = profile_names()
    assert "papers" in names
    for name in names:
        profile = load_profile(name)
        table = SimulatedTable([SimulatedNode(0, profile, lambda _: None)])
        assert table.modelled[0]
        assert table.decode_base[0] == profile.performance.decode.base
