"""The simulated node admits whom the node's own code admits, step by step, over one simulated adapter memory.

Of the node's rules the simulation has those for one tenant's standard requests: places that are kept for strict and for
other tenants' calls, and preemption, are not simulated (docs/guide/simulate.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import PROFILE

from cluster.messages import Adapter, Sampling
from garnish.simulation.admission import Admission as SimulatedAdmission
from garnish.simulation.admission import WaitingQueue as SimulatedQueue
from garnish.simulation.job import Job
from garnish.simulation.loads import Loads
from node_agent.engine import admission
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.request import Request
from node_agent.engine.reserves import Callers, Reserves
from node_agent.engine.waiting import WaitingQueue
from node_agent.leases import Lease, NoRoom
from tests.support.draws import draws

BLOCK = 16
RANKS = {"a": 8, "b": 16, "c": 32, "d": 64}


class Store:
    """What Admission asks of an AdapterStore, answered by a simulated adapter memory of its own."""

    def __init__(self, loads: Loads) -> None:
        self.loads, self.now = loads, 0.0
        self.jobs: dict[int, Job] = {}
        """by the slots of their leases"""

    def ready(self, digest: str) -> bool:
        return self.loads.is_ready(adapter_job(digest))

    def on_device(self, digest: str) -> bool:
        return self.loads.has_room(adapter_job(digest))

    def loaded(self, lease: Lease) -> bool:
        entry = self.jobs[lease.slot].entry
        return entry is not None and entry.is_complete

    def choose_spared(self, adapter: Adapter, digests: Iterable[str]) -> Collection[str]:
        return ()

    def acquire(self, adapter: Adapter, spared: Collection[str] = ()) -> Lease | NoRoom:
        job = adapter_job(adapter.digest)
        if not self.loads.lease(job, self.now):
            return NoRoom()
        self.jobs[len(self.jobs)] = job
        return Lease(adapter.digest, len(self.jobs) - 1, adapter.ranks)


def adapter_job(digest: str, number: int = 0, prompt: int = 1, output: int = 1, function: str = "") -> Job:
    rank = RANKS.get(digest, 0)
    size = rank * PROFILE.bytes_per_rank
    return Job(number, number * 1e-6, digest or None, rank, size, prompt, output, output, function=function)


class Simulated:
    def __init__(self, profile: Any) -> None:
        self.loads, self.queue, self.running = Loads(profile), SimulatedQueue(), dict[Job, None]()
        self.kv_free = profile.kv_tokens
        self._admission = SimulatedAdmission(profile, self.loads)

    def submit(self, job: Job, now: float) -> None:
        self.loads.prefetch(job, now)
        self.queue.add(job)

    def admit(self, now: float) -> list[int]:
        self.loads.advance(now)
        admitted = self._admission.choose(self.queue, self.running, self.kv_free, now)
        self.running |= dict.fromkeys(admitted)
        self.kv_free -= sum(job.kv for job in admitted)
        return [job.number for job in admitted]

    def end(self, number: int) -> None:
        job = next(job for job in self.running if job.number == number)
        del self.running[job]
        self.kv_free += job.kv
        self.loads.release(job)


class Node:
    """A node's queue, blocks and admission."""

    def __init__(self, profile: Any) -> None:
        self.max_rows, self.blocks = profile.max_rows, BlockPool(profile.kv_tokens // BLOCK + 1, BLOCK)
        self.store, self.queue = Store(Loads(profile)), WaitingQueue(99)
        self.running: dict[int, Request] = {}

    def submit(self, job: Job, now: float) -> None:
        digest = job.digest or ""
        self.store.loads.prefetch(adapter_job(digest), now)
        adapter = Adapter(digest, "", job.bytes, (job.rank,)) if digest else None
        tokens = [1] * job.prompt
        request = Request(str(job.number), "", tokens, job.max_tokens, Sampling(), 1e9, adapter, False)
        request.function, request.arrived = job.function, job.at
        self.queue.add(request)

    def admit(self, now: float) -> list[int]:
        self.store.loads.advance(now)
        self.store.now = now
        running = list(self.running.values())
        reserves = Reserves(Callers(), self.queue, running, self.max_rows, self.blocks.total)
        look: Any = admission.Admission(
            running,
            self.max_rows,
            Prefixes(self.blocks, False),
            self.store,
            reserves,
            preempted,  # type: ignore[arg-type]
        )
        with patch.object(admission, "time", SimpleNamespace(monotonic=lambda: now)):
            look.look_at(self.queue)
        assert not look.refused
        self.running |= {int(request.id): request for request in look.admitted}
        return [int(request.id) for request in look.admitted]

    def end(self, number: int) -> None:
        request = self.running.pop(number)
        self.blocks.release(request.blocks)
        if request.lease is not None:
            self.store.loads.release(self.store.jobs[request.lease.slot])


def preempted(request: Request) -> None:
    raise AssertionError(f"{request.id} was preempted")


CALLS = st.lists(
    st.tuples(st.sampled_from(["", *RANKS]), st.integers(1, 90), st.integers(1, 60), st.sampled_from(["f", "g"])),
    min_size=1,
    max_size=6,
)
ROUNDS = st.lists(
    st.tuples(CALLS, st.sampled_from([0.0, 0.003, 0.05, 0.6, 1.5]), st.integers(0, 99)),
    min_size=3,
    max_size=12,
)


@settings(max_examples=draws(100))
@given(rounds=ROUNDS, max_rows=st.integers(1, 24), blocks=st.integers(10, 30), memory=st.sampled_from([40_000, 70_000]))
def test_both_admit_the_same_requests_in_the_same_order(
    rounds: list[Any], max_rows: int, blocks: int, memory: int
) -> None:
    profile = msgspec.structs.replace(
        PROFILE, max_rows=max_rows, block_tokens=BLOCK, kv_tokens=blocks * BLOCK, adapter_memory=memory
    )
    simulated, node = Simulated(profile), Node(profile)
    now, number = 1.0, 0
    for calls, seconds, ending in rounds:
        for digest, prompt, output, function in calls:
            number += 1
            simulated.submit(adapter_job(digest, number, prompt, output, function), now)
            node.submit(adapter_job(digest, number, prompt, output, function), now)
        assert node.admit(now) == simulated.admit(now)
        now += seconds
        if node.running:
            gone = sorted(node.running)[ending % len(node.running)]
            node.end(gone)
            simulated.end(gone)
        assert simulated.kv_free == node.blocks.free * BLOCK
