"""dLoRA's way, for comparison: requests go to the least loaded node, and every while some move to one with less.

Waiting requests move first. A running one moves only where the difference is large; what it has computed is lost and
computed again where it arrives, prompt and tokens alike (KV memory is not sent). Each request moves once at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from garnish.simulation.job import Job
from garnish.simulation.node import Arrived, SimulatedNode
from gateway.scheduling.baselines import MostIdle

PERIOD = 1.0
"""Simulated seconds."""
LEAST_GAP, RUNNING_GAP = 2, 6
"""Requests that one node must have more than another for a waiting one, or a running one, to move."""


class Dlora(MostIdle):
    period = PERIOD

    def rebalance(self, nodes: Sequence[SimulatedNode], now: float, arrived: Arrived) -> None:
        loads = [len(node.running) + len(node.queue) - len(node.leaving) for node in nodes]
        for _ in nodes:  # as many moves at most
            most, least = loads.index(max(loads)), loads.index(min(loads))
            job = _movable(nodes[most], loads[most] - loads[least])
            if job is None:
                return
            nodes[most].move(job, now, partial(_arrive, least, arrived))
            loads[most] -= 1
            loads[least] += 1


def _movable(node: SimulatedNode, gap: int) -> Job | None:
    """The request that came last, or runs and has computed least."""
    if gap < LEAST_GAP:
        return None
    waiting = next((job for job in reversed(list(node.queue)) if not job.moves), None)
    if waiting is not None or gap < RUNNING_GAP:
        return waiting
    running = [job for job in node.running if not job.moves and job not in node.leaving]
    return min(running, key=lambda job: (job.prompt + job.generated, job.number), default=None)


def _arrive(index: int, arrived: Arrived, job: Job, now: float) -> None:
    job.node = index
    arrived(job, now)
