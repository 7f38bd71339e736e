"""Heartbeats that renew the leader's lease, and the jobs that run while the lease is held."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from adapters.errors import StoreUnavailable
from cluster.leases import Leases
from cluster.redis_link import RedisAway
from gateway.background import background
from gateway.leader.metrics import LeaderMetrics
from gateway.leader.tick import Job, Tick, TickEnded

LEASE = "leader"
LEASE_SECONDS = 2.5
BEATS_A_LEASE = 3
"""Number of heartbeats within the duration of a lease. A killed leader is replaced within one lease and two heartbeats.

Others may see its last write one heartbeat late, and the end of its lease another one late. With Redis, whose clock
ends the lease, the replacement takes one heartbeat less: 3.3 s, plus the pause of a job.
"""
LEASE_ANSWER_SECONDS = 2.0
TICK_SECONDS = 10.0
"""Seconds from the start of a tick, which is one call of a job, to its deadline."""
OVERTIME_SECONDS = 30.0
"""Seconds from a tick's deadline until it is cancelled. This is longer than one call of the store may take."""

log = logging.getLogger("gateway")


def worker_name() -> str:
    """Returns a name of this process for /metrics and the lease, unique among all gateways' workers."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Leader:
    """Leader election of one worker. `clock`: monotonic seconds. `name`: unique among all workers."""

    def __init__(
        self,
        leases: Leases,
        name: str,
        jobs: Sequence[Job],
        metrics: LeaderMetrics,
        clock: Callable[[], float],
        lease_seconds: float = LEASE_SECONDS,
        *,
        alone: bool = False,
    ) -> None:
        """`alone`: True if no other worker knows the same nodes. Then this worker runs the jobs about nodes even
        without the lease."""
        self.name = name
        self._leases = leases
        self._jobs = jobs
        self._metrics = metrics
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._alone = alone
        self._lease_ends_at = -math.inf
        self._since = -math.inf
        """Time, by the clock, at which the lease was last acquired. Renewals do not change it."""
        self._led = self._failing = False

    def leads(self) -> bool:
        """Returns whether this process leads. It is False once the lease has ended, even if the process was suspended
        meanwhile."""
        return self._clock() < self._lease_ends_at

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renews the lease and runs the jobs as long as the context lasts, then frees the lease."""
        try:
            async with background(self._beats, *(partial(self._turns, job) for job in self._jobs)):
                yield
        finally:
            await self._resign()

    async def beat(self) -> None:
        """Tries to acquire the lease, or renews it if this worker holds it."""
        asked_at = self._clock()
        try:
            async with asyncio.timeout(LEASE_ANSWER_SECONDS):
                lease = await self._leases.take(LEASE, self.name, self._lease_seconds)
        except (RedisAway, StoreUnavailable, TimeoutError) as error:
            if not self._failing:
                log.warning(
                    "the leader's lease can't be read or renewed", extra={"why": str(error) or "no answer in time"}
                )
            self._failing = True
            self._metrics.count_beat("failed")
        else:
            self._failing = False
            self._since = self._since if asked_at < self._lease_ends_at else asked_at
            self._lease_ends_at = asked_at + lease.seconds if lease.holder == self.name else -math.inf
            self._metrics.count_beat("led" if lease.holder == self.name else "followed")
        self._record_change()

    async def run_once(self, job: Job) -> None:
        """Runs one tick of the job, if this worker leads."""

        always = self._alone and job.scope == "nodes"

        def leads() -> bool:
            return always or self.leads()

        if not leads():
            return
        since = -math.inf if always else self._since
        tick, failed = Tick(self._clock() + TICK_SECONDS, self._clock, leads, since), False
        try:
            async with asyncio.timeout(TICK_SECONDS + OVERTIME_SECONDS):
                await job.run(tick)
        except TickEnded:
            pass
        except Exception as error:  # any error: the job still gets its next tick
            failed = True
            log.error("a job of the leader failed; it is tried again", extra={"job": job.name}, exc_info=error)
        finally:
            self._metrics.count_turn(job.name, tick.work, failed)

    async def _beats(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(self._lease_seconds / BEATS_A_LEASE)

    async def _turns(self, job: Job) -> None:
        while True:
            await self.run_once(job)
            await asyncio.sleep(job.pause_seconds)

    async def _resign(self) -> None:
        if self.leads():
            self._lease_ends_at = -math.inf
            with suppress(RedisAway, StoreUnavailable, TimeoutError):
                async with asyncio.timeout(LEASE_ANSWER_SECONDS):
                    await self._leases.free(LEASE, self.name)
        self._record_change()

    def _record_change(self) -> None:
        leads = self.leads()
        self._metrics.set_leads(self.name, leads)
        if leads != self._led:
            log.info("this worker leads" if leads else "this worker no longer leads", extra={"worker": self.name})
        self._led = leads
