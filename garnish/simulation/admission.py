"""Waiting queue and admission of a simulated node, with the rules of `node_agent/engine/admission.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from cluster.fair_shares import FairShares, in_fair_order, token_cost
from garnish.simulation.job import Job
from garnish.simulation.loads import Loads
from garnish.simulation.profile import NodeProfile

STARVED_AFTER_SECONDS = 1.0
"""Seconds that a request waits for adapter memory until other requests may no longer overtake it.

The value is that of a real node.
"""


class Admission:
    """Admits requests to the batch in the order of fair shares, while rows, KV blocks and adapter memory are free.

    Requests whose adapter is loading use at most a quarter of the rows and half of the KV memory. The first of them may
    use more KV memory.
    """

    def __init__(self, profile: NodeProfile, loads: Loads) -> None:
        self._profile, self._loads = profile, loads
        self._short_since: dict[Job, float] = {}

    def choose(self, queue: WaitingQueue, running: Collection[Job], kv_free: int, now: float) -> list[Job]:
        """Removes from `queue` the requests that can be admitted now, and returns them.

        `kv_free` is the free KV memory in tokens. For each returned request a lease on its adapter is acquired, and
        `job.kv` is set to the KV memory that it reserves, in tokens.
        """
        profile, admitted = self._profile, list[Job]()
        loading = [job for job in running if job.entry is not None and not job.entry.is_complete]
        rows, kv = max(1, profile.max_rows // 4) - len(loading), sum(job.kv for job in loading)
        room_is_short = starved = False
        for job in queue.in_order():
            need = self.kv_tokens(job)
            if len(running) + len(admitted) >= profile.max_rows or need > kv_free:
                break
            ready = self._loads.is_ready(job)
            may_load = ready or (rows > 0 and (not kv or kv + need <= profile.kv_tokens // 2))
            passes = not (starved or (room_is_short and not self._loads.has_room(job)))
            if (job.digest is not None and not (passes and may_load)) or not self._loads.lease(job, now):
                if job.digest is not None and passes and may_load:
                    room_is_short = True
                    starved = now - self._short_since.setdefault(job, now) >= STARVED_AFTER_SECONDS
                continue
            self._short_since.pop(job, None)
            if not ready:
                rows, kv = rows - 1, kv + need
            job.kv = need
            kv_free -= need
            queue.take(job)
            admitted.append(job)
        return admitted

    def kv_tokens(self, job: Job) -> int:
        """Returns the KV memory that the request reserves, in tokens: its full length, rounded up to blocks."""
        block = self._profile.block_tokens
        return -(-(job.prompt + job.max_tokens) // block) * block


class WaitingQueue:
    """Requests that wait on a simulated node, in the order of fair shares (`cluster.fair_shares`).

    The order is that of a real engine.
    """

    def __init__(self) -> None:
        self.shares = FairShares()
        self._jobs: dict[Job, None] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """Iterates over the waiting requests in the order of arrival."""
        return iter(list(self._jobs))

    def in_order(self) -> Iterator[Job]:
        """Yields the waiting requests in the order of fair shares.

        The caller may remove requests that were already yielded.
        """
        return iter(self) if len(self._jobs) < 2 else in_fair_order(list(self._jobs), self.shares)

    def add(self, job: Job) -> None:
        self._jobs[job] = None
        self.shares.join(job.tenant, job.function)

    def remove(self, job: Job) -> None:
        del self._jobs[job]
        self.shares.leave(job.tenant, job.function)

    def take(self, job: Job) -> None:
        """Removes an admitted job, and charges it for its prompt, unless it was moved from another node.

        Raises KeyError if the job is not in the queue.
        """
        if not job.moves:
            self._charge(job, token_cost(job.prompt, 0, job.rank))
        self.remove(job)

    def charge_tokens(self, job: Job, generated: int) -> None:
        """Charges the job's tenant and function for output tokens that were not charged yet.

        `generated` is the job's current number of output tokens.
        """
        if generated > job.charged:
            self._charge(job, token_cost(0, generated - job.charged, job.rank))
            job.charged = generated

    def tenant_counter(self, job: Job) -> float:
        """Returns the virtual token counter of the job's tenant.

        The tenant with the smallest counter is served first, in the queue and in the batch.
        """
        return self.shares.tenant(job.tenant)

    def _charge(self, job: Job, service: float) -> None:
        self.shares.charge(job.tenant, job.function, job.weight, service)
