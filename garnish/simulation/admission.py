"""Who enters a simulated node's batch: the rules of `node_agent/engine/admission.py`."""

from __future__ import annotations

from collections.abc import Collection

from garnish.simulation.job import Job
from garnish.simulation.loads import Loads
from garnish.simulation.profile import NodeProfile
from garnish.simulation.waiting import WaitingQueue

STARVED_AFTER = 1.0
"""As on a node."""


class Admission:
    """Admits requests to the batch in the order of fair shares, within free rows, KV blocks and adapter memory.
    Requests whose adapter is on its way hold at most a quarter of the rows and, but for the first of them, half of the
    KV memory."""

    def __init__(self, profile: NodeProfile, loads: Loads) -> None:
        self._profile, self._loads = profile, loads
        self._short_since: dict[Job, float] = {}

    def choose(self, queue: WaitingQueue, running: Collection[Job], kv_free: int, now: float) -> list[Job]:
        """Takes the requests that it admits out of `queue`, and returns them; each has a lease and knows its `kv`."""
        profile, admitted = self._profile, list[Job]()
        loading = [job for job in running if job.entry is not None and not job.entry.whole]
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
                    starved = now - self._short_since.setdefault(job, now) >= STARVED_AFTER
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
        """Returns the tokens of KV memory that the request reserves: its whole length, in blocks."""
        block = self._profile.block_tokens
        return -(-(job.prompt + job.max_tokens) // block) * block
