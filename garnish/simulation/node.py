"""Simulated node with continuous batching, as in `node_agent/engine`, timed by a performance model.

An iteration is one decode step of all decoding rows, together with chunks of prompts, oldest first. Consecutive
iterations without prompts are computed together in closed form (`DecodeRun`), until a row ends, or a request or an
adapter arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

from cluster.performance_model import counted_rank
from garnish.simulation.admission import Admission, WaitingQueue
from garnish.simulation.batch import RANK_TERM, DecodeRun, RankMix
from garnish.simulation.job import Job
from garnish.simulation.loads import Loads
from garnish.simulation.profile import NodeProfile

Arrived = Callable[[Job], None]
Pace = Callable[[], float]
"""Returns a factor for the modelled duration of the pass that starts now.

It stands for the model's error and for the variation of passes.
"""


class SimulatedNode:
    """A node that computes in simulated time.

    `wake` must be called at the time `next_time`, which may change with each method call. Other classes must not set
    attributes.
    """

    def __init__(
        self, index: int, profile: NodeProfile, ended: Callable[[Job], None], pace: Pace = lambda: 1.0
    ) -> None:
        """`ended` is called with each finished request.

        `pace` is called once per pass; the decode steps of a DecodeRun count as one pass.
        """
        self.index, self.profile, self._ended, self._pace = index, profile, ended, pace
        self.loads = Loads(profile)
        self._admission = Admission(profile, self.loads)
        self.queue = WaitingQueue()
        self.running: dict[Job, None] = {}
        """running jobs in the order of admission; a dict is used as an ordered set"""
        self.prefilling: list[Job] = []
        self.stalled: list[Job] = []
        """jobs whose prompt is computed and whose adapter is incomplete on the device"""
        self.leaving: dict[Job, Arrived] = {}
        padded_rank = profile.performance.decode.padded_rank
        self.queued_mix, self.running_mix, self.decoding = (RankMix(padded_rank) for _ in range(3))
        self.queued_tokens = 0
        self._promised: dict[float, int] = {}
        """number of jobs on this node by their TPOT SLO in seconds"""
        self.kv_free = profile.kv_tokens
        self.acknowledged: list[str] = []
        """ids of requests that arrived since the node's last record"""
        self.next_time = inf
        self.busy = 0.0
        self.steps = 0
        self.run: DecodeRun | None = None
        """current run of decode steps; None if the iteration has prompts"""
        self.chunks: list[tuple[Job, int]] = []
        """jobs and their prompt tokens in the current iteration; empty if it has only decode steps"""
        self.iteration_end = inf
        """end of the current iteration or run in simulated seconds; inf for an idle node"""
        self._iteration_begin = 0.0
        self._start = inf
        """time at which an idle node starts its next iteration, in simulated seconds; inf if there is none

        It is the time of an arrival, so that requests that arrive at the same time share the iteration.
        """
        self._finishing: list[tuple[int, int, Job]] = []
        """heap of decoding rows as (number of the row's last step, order of insertion, job)"""
        self._contexts = 0
        """computed tokens of all running requests at the start of the iteration or run"""
        self._order = 0
        self._term = RANK_TERM[profile.performance.decode.rank_term]

    # --- calls from the simulator

    def submit(self, job: Job, now: float) -> None:
        """Adds a new request to the queue, or a request moved from another node with its generated tokens."""
        job.node, job.remaining = self.index, job.prompt + job.generated
        tier = self.loads.prefetch(job, now)
        if not job.moves:
            job.arrival_tier = tier
        if self.queue:
            self._charge(now)
        self.queue.add(job)
        self.queued_mix.add(job.digest, job.rank)
        self.queued_tokens += job.remaining
        self._promise(job, 1)
        self.acknowledged.append(str(job.number))
        self._interrupt(now)
        self._set_next()

    def wake(self, now: float) -> None:
        moved = self.loads.advance(now)
        if self.iteration_end <= now:
            self._end_iteration(self.iteration_end)
        if self.iteration_end == inf:
            self._start = inf
            self._begin(now)
        elif moved:
            self._interrupt(now)
        self._set_next()

    def move(self, job: Job, now: float, arrived: Arrived) -> None:
        """Removes a request, and then calls `arrived` with it.

        A waiting request is removed at once, a running one at the end of the iteration.
        """
        if job in self.running:
            self.leaving[job] = arrived
            self._interrupt(now)
            self._set_next()
            return
        self.queue.remove(job)
        self.queued_mix.remove(job.digest, job.rank)
        self.queued_tokens -= job.remaining
        self._promise(job, -1)
        job.moves += 1
        arrived(job)

    # --- state

    def contexts(self, now: float) -> int:
        """Returns the number of computed tokens of all running requests."""
        return self._contexts + self._steps_of_run(now) * self.decoding.rows

    def context(self, job: Job, now: float) -> int:
        """Returns the number of computed tokens of a running request, prompt and output."""
        return job.prompt + self.tokens(job, now) - (job.remaining or 1)

    def tokens(self, job: Job, now: float) -> int:
        """Returns the number of output tokens that a request of this node has generated by the time `now`. Tokens from
        nodes that it was on before are included."""
        if not job.finish_step:
            return job.generated
        return job.output - (job.finish_step - self.steps - self._steps_of_run(now))

    def prompt_left(self) -> int:
        """Returns the number of prompt tokens, of waiting and running requests, that are not computed yet."""
        return self.queued_tokens + sum(job.remaining for job in self.prefilling)

    def tightest_tpot(self) -> float | None:
        return min(self._promised, default=None)

    def _promise(self, job: Job, more: int) -> None:
        if job.tpot_slo is not None:
            count = self._promised.pop(job.tpot_slo, 0) + more
            if count:
                self._promised[job.tpot_slo] = count

    def _steps_of_run(self, now: float) -> int:
        return self.run.done_by(now) if self.run is not None else 0

    # --- iterations

    def _set_next(self) -> None:
        self.next_time = min(self.iteration_end, self.loads.next, self._start)

    def _interrupt(self, now: float) -> None:
        """Ends the run of decode steps after the current step; starts the next iteration of an idle node.

        It is called when a request or an adapter arrives.
        """
        if self.iteration_end == inf:
            self._start = now
        elif self.run is not None:
            self.run.cut(now)
            self.iteration_end = self.run.end

    def _begin(self, now: float) -> None:
        if self.queue and len(self.running) < self.profile.max_rows:
            self._admit(now)
        if self.stalled:
            self.stalled = [job for job in self.stalled if not self._starts_to_decode(job)]
        self.chunks = self._choose_chunks() if self.prefilling else []
        if self.chunks:
            self.iteration_end = now + self._pace() * self._mixed_seconds()
        elif self._finishing:
            pace, (first, growth) = self._pace(), self._step()
            self.run = DecodeRun(now, pace * first, pace * growth, steps=self._finishing[0][0] - self.steps)
            self.iteration_end = self.run.end
        self._iteration_begin = now

    def _step(self) -> tuple[float, float]:
        """Returns the duration of the next decode step, and its growth with each further step, in seconds."""
        model, rows = self.profile.performance.decode, self.decoding.rows
        other_contexts = sum(
            job.prompt + job.generated - (job.remaining or 1) for job in (*self.prefilling, *self.stalled)
        )
        first = model.seconds(rows, self._contexts - other_contexts, self._term(self.decoding))
        return first, model.per_context * rows

    def _mixed_seconds(self) -> float:
        model, chunks = self.profile.performance, self.chunks
        seconds = model.prefill.seconds(
            sum(length for _, length in chunks),
            sum(_squares(job, length) for job, length in chunks),
            sum(length * counted_rank(job.rank, model.prefill.padded_rank) for job, length in chunks),
        )
        if not self.decoding.rows:
            return seconds
        both = seconds + self._step()[0]
        return both - min(model.prefill.base, model.decode.base) if self.profile.one_pass else both

    def _choose_chunks(self) -> list[tuple[Job, int]]:
        budget = max(self.profile.chunk_tokens - self.decoding.rows, 1)
        chunks: list[tuple[Job, int]] = []
        for job in sorted(self.prefilling, key=self.queue.tenant_counter):
            if not budget:
                break
            if job.entry is None or job.entry.ready:
                chunks.append((job, min(job.remaining, budget)))
                budget -= chunks[-1][1]
        return chunks

    def _end_iteration(self, now: float) -> None:
        steps = self.run.steps if self.run is not None else int(self.decoding.rows > 0)
        self.busy += now - self._iteration_begin
        self.steps += steps
        self._contexts += steps * self.decoding.rows
        self.run, self.iteration_end = None, inf
        while self._finishing and self._finishing[0][0] <= self.steps:
            job = heappop(self._finishing)[2]
            self.decoding.remove(job.digest, job.rank)
            job.generated = job.output
            self._finish(job, now)
        for job, length in self.chunks:
            job.remaining -= length
            self._contexts += length
            if not job.remaining:
                self.prefilling.remove(job)
                self._take_first(job, now)
        self.chunks = []
        if self.leaving:
            self._let_go(now)

    def _take_first(self, job: Job, now: float) -> None:
        """Counts the first token of the request, which then ends, decodes, or waits for its adapter."""
        job.generated += 1
        job.first_token = job.first_token or now
        if job.generated >= job.output:
            self._finish(job, now)
        elif not self._starts_to_decode(job):
            self.stalled.append(job)

    def _starts_to_decode(self, job: Job) -> bool:
        if job.entry is not None and not job.entry.is_complete:
            return False
        job.finish_step = self.steps + job.output - job.generated
        self._order += 1
        heappush(self._finishing, (job.finish_step, self._order, job))
        self.decoding.add(job.digest, job.rank)
        return True

    # --- admission and removal

    def _charge(self, now: float) -> None:
        """Charges the tenants of running requests for output tokens that were not charged yet.

        To save time, it is called only before the virtual token counters are read.
        """
        for job in self.running:
            self.queue.charge_tokens(job, self.tokens(job, now))

    def _admit(self, now: float) -> None:
        if len(self.queue) > 1:
            self._charge(now)
        for job in self._admission.choose(self.queue, self.running, self.kv_free, now):
            self.queued_mix.remove(job.digest, job.rank)
            self.queued_tokens -= job.remaining
            self.running_mix.add(job.digest, job.rank)
            self.kv_free -= job.kv
            job.admitted = job.admitted or now
            self.running[job] = None
            self.prefilling.append(job)

    def _finish(self, job: Job, now: float) -> None:
        self.queue.charge_tokens(job, job.output)
        self._leave(job)
        if not self.running and not self.queue:
            self.queue.shares.reset()
        job.end, job.outcome = now, "done"
        self._ended(job)

    def _leave(self, job: Job) -> None:
        """Frees the request's row, KV memory and lease. The request's `generated` must be up to date."""
        self._contexts -= job.prompt + job.generated - (job.remaining or 1)
        del self.running[job]
        self.running_mix.remove(job.digest, job.rank)
        self.kv_free += job.kv
        self._promise(job, -1)
        self.loads.release(job)
        self.leaving.pop(job, None)

    def _let_go(self, now: float) -> None:
        """Removes the running requests that are to move, and calls their `arrived`.

        The new nodes compute all tokens of these requests again.
        """
        for job, arrived in list(self.leaving.items()):
            if job in self.prefilling:
                self.prefilling.remove(job)
            elif job in self.stalled:
                self.stalled.remove(job)
            else:
                job.generated = self.tokens(job, now)
                self._finishing = [entry for entry in self._finishing if entry[2] is not job]
                heapify(self._finishing)
                self.decoding.remove(job.digest, job.rank)
            self._leave(job)
            job.finish_step, job.moves = 0, job.moves + 1
            arrived(job)


def _squares(job: Job, length: int) -> int:
    """Returns e * e - b * b for a chunk from token b to e.

    It is the performance model's measure of the work of attention.
    """
    begin = job.prompt + job.generated - job.remaining
    return (begin + length) ** 2 - begin**2
