"""The simulation's event loop: requests arrive and are routed, and nodes compute and send records.

A node sends its record every RECORD_INTERVAL seconds, so that records are as old at routing as for a real gateway.
Equal inputs and seeds give equal results: nothing depends on the host's clock or on hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf
from time import thread_time

import numpy as np

from cluster.news import RECORD_INTERVAL
from cluster.node_table import Demand
from garnish.simulation.columns import BASE, SimulatedTable
from garnish.simulation.job import Job
from garnish.simulation.node import Pace, SimulatedNode
from garnish.simulation.oracle import Oracle
from garnish.simulation.profile import NodeProfile
from gateway.scheduling.dlora import Migrates, MovableRequest
from gateway.scheduling.lengths import ResponseLengths
from gateway.scheduling.policy import Policy
from gateway.scheduling.request import RoutingRequest
from gateway.scheduling.route import eligible_nodes

WAKE, RECORD, REBALANCE = range(3)
NOBODY: frozenset[str] = frozenset()
MakePolicy = Callable[[Callable[[], float]], Policy]


class StuckError(RuntimeError):
    """Requests would never end, because of an error in the simulator."""


class Simulator:
    def __init__(
        self,
        profile: NodeProfile,
        nodes: int,
        policy: MakePolicy,
        jobs: Sequence[Job],
        pace: Callable[[int], Pace] = lambda _: lambda: 1.0,
    ) -> None:
        """Creates a simulation. `policy` is a function that takes the simulated clock and returns the routing policy.

        `jobs` are sorted by `at` and numbered from 0. `pace(i)` returns a function that is called for each pass of node
        i. Its result is a factor for the duration of the pass. The records that nodes send have the profile's
        performance model, without these factors.
        """
        self.now = 0.0
        self.profile, self.policy, self.jobs = profile, policy(lambda: self.now), jobs
        self.nodes = [SimulatedNode(i, profile, self._ended, pace(i)) for i in range(nodes)]
        self.table = SimulatedTable(self.nodes)
        self.lengths = ResponseLengths()
        self.events = 0
        self.decisions: list[float] = []
        """CPU seconds of each routing by the policy, measured on this host"""
        self._remaining = len(jobs)
        self._heap: list[tuple[float, int, int, int]] = []
        self._order = 0
        self._woken = [inf] * nodes
        self._record_due = [inf] * nodes
        if isinstance(self.policy, Oracle):
            self.policy.attach(self.nodes, jobs)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Runs the simulation until all requests have ended.

        `progress` is called after every 1,000 routed requests, with the number of routed requests. Raises StuckError.
        """
        for i in range(len(self.nodes)):
            self._record_at(i, RECORD_INTERVAL * i / len(self.nodes))
        if isinstance(self.policy, Migrates):
            self._push(self.policy.period, REBALANCE, 0)
        heap = self._heap
        for job in self.jobs:
            while heap[0][0] < job.at:
                self._next_event()
            self.now = job.at
            self._route(job)
            if progress is not None and job.number % 1000 == 999:
                progress(job.number + 1)
        while self._remaining:
            if not self.events % 4096 and all(node.next_time == inf for node in self.nodes):
                raise StuckError(f"{self._remaining} requests will never end")
            self._next_event()

    # --- events

    def _next_event(self) -> None:
        time, _, kind, index = heappop(self._heap)
        self.events += 1
        if kind == WAKE:
            node = self.nodes[index]
            if node.next_time == time:
                self.now = time
                self._woken[index] = inf
                node.wake(time)
                self._touched(node)
        elif kind == RECORD:
            if self._record_due[index] == time:
                self.now = time
                self._record(self.nodes[index])
        else:
            assert isinstance(self.policy, Migrates)
            self.now = time
            self._rebalance(self.policy)
            self._push(time + self.policy.period, REBALANCE, 0)

    def _touched(self, node: SimulatedNode) -> None:
        """Schedules a call of the node's `wake` if its `next_time` has changed."""
        index, time = node.index, node.next_time
        if time != self._woken[index] and time != inf:
            self._woken[index] = time
            self._push(time, WAKE, index)

    def _record(self, node: SimulatedNode) -> None:
        self.table.receive(node, self.now)
        self._record_at(node.index, self.now + RECORD_INTERVAL)

    def _record_at(self, index: int, time: float) -> None:
        self._record_due[index] = time
        self._push(time, RECORD, index)

    def _push(self, time: float, kind: int, index: int) -> None:
        self._order += 1
        heappush(self._heap, (time, self._order, kind, index))

    # --- requests

    def _route(self, job: Job) -> None:
        request, table = self._request(job), self.table
        table.now = self.now
        serving = eligible_nodes(table, BASE, request, NOBODY)
        free: np.ndarray = serving[~table.full[serving]]
        began = thread_time()
        row = self.policy.choose(table, free, request) if free.size and self._fits(job) else None
        self.decisions.append(thread_time() - began)
        if row is None:
            job.end, job.outcome = self.now, "rejected"
            self._remaining -= 1
            return
        table.reserve(row, request.id, request.demand)
        self._submit(job, self.nodes[row])

    def _fits(self, job: Job) -> bool:
        """Returns True if an empty node can take the job."""
        block, profile = self.profile.block_tokens, self.profile
        bounds = [size for size in (profile.adapter_memory, profile.host_memory) if size is not None]
        kv_tokens = -(-(job.prompt + job.max_tokens) // block) * block
        return kv_tokens <= profile.kv_tokens and all(job.bytes <= size for size in bounds)

    def _request(self, job: Job) -> RoutingRequest:
        """Returns the routing request for the job, with only what a gateway would know."""
        expected = self.lengths.expected(job.tenant, job.digest or "", job.max_tokens)
        return RoutingRequest(
            id=str(job.number),
            demand=Demand(job.rank, job.prompt, job.max_tokens, job.tpot_slo),
            digest=job.digest,
            adapter_bytes=job.bytes,
            expected_tokens=expected,
            expected_inverse=self.lengths.inverse(expected),
            typical_tokens=self.lengths.typical(),
            ttft=job.ttft_slo,
        )

    def _submit(self, job: Job, node: SimulatedNode) -> None:
        node.submit(job, self.now)
        self._touched(node)

    def _rebalance(self, policy: Migrates) -> None:
        """Moves the requests that the policy selects.

        A waiting request moves at once, a running one when its iteration ends.
        """
        loads = {node.index: len(node.running) + len(node.queue) - len(node.leaving) for node in self.nodes}
        for move in policy.moves(loads, [movable for node in self.nodes for movable in _movable(node, self.now)]):
            job = self.jobs[int(move.id)]
            self.nodes[job.node].move(job, self.now, partial(self._submit, node=self.nodes[move.row]))
        for node in self.nodes:
            self._touched(node)

    def _ended(self, job: Job) -> None:
        self._remaining -= 1
        self.lengths.record(job.tenant, job.digest or "", job.output)


def _movable(node: SimulatedNode, now: float) -> Iterator[MovableRequest]:
    """Yields those of the node's jobs that were never moved."""
    for job in node.queue:
        if not job.moves:
            yield MovableRequest(str(job.number), node.index, runs=False, tokens=job.prompt + job.generated)
    for job in sorted(node.running, key=lambda job: job.number):
        if not job.moves and job not in node.leaving:
            yield MovableRequest(str(job.number), node.index, runs=True, tokens=job.prompt + node.tokens(job, now))
