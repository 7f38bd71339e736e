"""A policy that no gateway can have: it knows each answer's length and what every node is doing.

It tries every node by running it forward, with the request and without, and chooses the one where all requests' times
per token, added up, grow least. What is yet to come it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.node_table import NodeTable
from garnish.simulation.forward import Forward
from garnish.simulation.job import Job
from garnish.simulation.node import SimulatedNode
from gateway.scheduling.request import PlacementRequest


class Oracle:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nodes: Sequence[SimulatedNode] = ()
        self._jobs: Sequence[Job] = ()

    def attach(self, nodes: Sequence[SimulatedNode], jobs: Sequence[Job]) -> None:
        self._nodes, self._jobs = nodes, jobs

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:  # noqa: ARG002 - it looks at the nodes themselves
        job, now = self._jobs[int(request.id)], self._clock()
        added = {row: _added(self._nodes[row], job, now) for row in candidates.tolist()}
        return int(min(added, key=lambda row: (added[row], row)))


def _added(node: SimulatedNode, job: Job, now: float) -> float:
    return Forward(node, now, job).total() - Forward(node, now, None).total()
