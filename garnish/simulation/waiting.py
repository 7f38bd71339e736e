"""Requests that wait on a simulated node, in the order of fair shares (`cluster.fair_shares`), as in the engine."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.fair_shares import FairShares, in_fair_order, token_cost
from garnish.simulation.job import Job


class WaitingQueue:
    def __init__(self) -> None:
        self.shares = FairShares()
        self._jobs: dict[Job, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Iterates over the waiting requests in the order in which they came."""
        return iter(list(self._jobs))

    def in_order(self) -> Iterator[Job]:
        """Yields the waiting requests as their turns come; the caller may remove the ones it has been given
        meanwhile."""
        return iter(self) if len(self._jobs) < 2 else in_fair_order(list(self._jobs), self.shares)

    def add(self, job: Job) -> None:
        self._jobs[job] = None
        self.shares.join(job.tenant, job.function)

    def remove(self, job: Job) -> None:
        del self._jobs[job]
        self.shares.leave(job.tenant, job.function)

    def take(self, job: Job) -> None:
        """Removes a job that gets its place in the batch, and charges its prompt: not again after a move. Raises
        KeyError when it does not wait."""
        if not job.moves:
            self._charge(job, token_cost(job.prompt, 0, job.rank))
        self.remove(job)

    def charge_tokens(self, job: Job, generated: int) -> None:
        """Charges the job's tenant and function for its output tokens since the last call; it has `generated` now."""
        if generated > job.charged:
            self._charge(job, token_cost(0, generated - job.charged, job.rank))
            job.charged = generated

    def turn(self, job: Job) -> float:
        """Returns the counter of the request's tenant: the least is served first, in the batch, too."""
        return self.shares.tenant(job.tenant)

    def _charge(self, job: Job, service: float) -> None:
        self.shares.charge(job.tenant, job.function, job.weight, service)
