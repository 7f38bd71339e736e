"""Statistics of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from cluster.node_table import ABSENT, DEVICE, DISK, HOST
from garnish.simulation.job import Job
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import Slo

SHARES = (50, 90, 99)
FOUND = {DEVICE: "none", HOST: "host", DISK: "disk", ABSENT: "absent"}


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of times in seconds; all are 0 if there are no times."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class Summary(msgspec.Struct, frozen=True):
    requests: int
    done: int
    rejected: int
    attainment: float
    attainable: float
    """share of requests that an empty node with the adapter loaded would finish within the SLO

    No policy can have a higher attainment.
    """
    ttft: Distribution
    tpt: Distribution
    tpot: Distribution
    cold_starts: dict[str, int]
    """number of requests by the adapter's tier at their arrival: none, host, disk or absent

    `none` means that the adapter was on the device, or that the base model was called.
    """
    utilisation: float
    """share of the time that a node was computing, from the first arrival to the last end; mean over nodes"""
    least_utilisation: float
    most_utilisation: float
    output_tokens: int
    seconds: float
    moves: int


def summarise(simulator: Simulator, slo: Slo) -> Summary:
    jobs = [job for job in simulator.jobs if job.outcome == "done"]
    overhead, everyone = simulator.profile.overhead, simulator.jobs
    seconds = max((job.end for job in everyone), default=0.0) - min((job.at for job in everyone), default=0.0)
    busy = [node.busy / seconds if seconds else 0.0 for node in simulator.nodes]
    return Summary(
        requests=len(everyone),
        done=len(jobs),
        rejected=sum(job.outcome == "rejected" for job in everyone),
        attainment=sum(slo.holds(job, overhead) for job in jobs) / max(1, len(everyone)),
        attainable=sum(slo.attainable(job, simulator.profile) for job in everyone) / max(1, len(everyone)),
        ttft=_distribution(values(jobs, "ttft", overhead)),
        tpt=_distribution(values(jobs, "tpt", overhead)),
        tpot=_distribution(np.array([job.tpot for job in jobs if job.output > 1])),
        cold_starts=dict(sorted(Counter(FOUND[job.arrival_tier] for job in jobs).items())),
        utilisation=float(np.mean(busy)),
        least_utilisation=min(busy),
        most_utilisation=max(busy),
        output_tokens=sum(job.output for job in jobs),
        seconds=seconds,
        moves=sum(job.moves for job in everyone),
    )


def values(jobs: Sequence[Job], measure: str, overhead: float) -> np.ndarray:
    """Returns the ttft or tpt (`measure`) of all finished requests: f64[done], seconds, ascending.

    `overhead` is the time in seconds before the first token that the simulation leaves out.
    """
    done = [job for job in jobs if job.outcome == "done"]
    spread = [job.output if measure == "tpt" else 1 for job in done]
    seconds = [getattr(job, measure) + overhead / over for job, over in zip(done, spread, strict=True)]
    return np.sort(np.array(seconds, np.float64))


def _distribution(seconds: np.ndarray) -> Distribution:
    if not seconds.size:
        return Distribution()
    return Distribution(float(np.mean(seconds)), *(float(value) for value in np.percentile(seconds, SHARES)))
