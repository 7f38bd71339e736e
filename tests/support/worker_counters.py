"""What has become of the CPU workers and their handoffs so far."""

from __future__ import annotations

from dataclasses import dataclass

from node_agent.coldstart.stream import StreamPool
from node_agent.coldstart.workers import WorkerPool


@dataclass(frozen=True)
class Counters:
    handoffs: int
    timeouts: int
    """handoffs whose wait ended by its limit"""
    deaths: int
    """worker processes that ended by themselves or were killed"""
    restarts: int
    quarantined: int
    """slots that were closed before all their workers had answered"""
    in_quarantine: int
    """of these, how many still are"""
    takeovers: int
    """slices that another worker computed instead"""


def counters_of(pool: WorkerPool) -> Counters:
    pool.poll()
    keeper, ending = pool._keeper, len(pool._ending) if isinstance(pool, StreamPool) else 0
    return Counters(
        handoffs=pool._handoffs,
        timeouts=pool._timeouts,
        deaths=keeper.deaths,
        restarts=keeper.restarts,
        quarantined=pool._quarantined,
        in_quarantine=len(pool._quarantine) + ending,
        takeovers=pool._takeovers,
    )
