"""Routing policy that knows each answer's length and each node's state, as no real gateway can.

It simulates each node forward with and without the request. It chooses the node where the sum of all requests' times
per token grows least. It does not know future requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from cluster.node_table import NodeTable
from cluster.performance_model import counted_rank
from garnish.simulation.batch import RANK_TERM, DecodeRun, RankMix
from garnish.simulation.job import Job
from garnish.simulation.node import SimulatedNode
from gateway.scheduling.request import RoutingRequest


class Oracle:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nodes: Sequence[SimulatedNode] = ()
        self._jobs: Sequence[Job] = ()

    def attach(self, nodes: Sequence[SimulatedNode], jobs: Sequence[Job]) -> None:
        self._nodes, self._jobs = nodes, jobs

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:  # noqa: ARG002 - it looks at the nodes themselves
        job, now = self._jobs[int(request.id)], self._clock()
        added = {row: _added(self._nodes[row], job, now) for row in candidates.tolist()}
        return int(min(added, key=lambda row: (added[row], row)))


def _added(node: SimulatedNode, job: Job, now: float) -> float:
    return Forward(node, now, job).total() - Forward(node, now, None).total()


@dataclass(slots=True, eq=False)
class Prompt:
    job: Job
    remaining: int
    ready: float


class Forward:
    """Simulates a node's requests, and the request `extra`, from the end of the current iteration to their ends.

    It is a simplified simulation. KV memory and eviction are not modelled, and a load has the full bandwidth. A request
    with a computed prompt decodes even if its adapter is incomplete.
    """

    def __init__(self, node: SimulatedNode, now: float, extra: Job | None) -> None:
        self._profile = node.profile
        self._term = RANK_TERM[node.profile.performance.decode.rank_term]
        self._mix = RankMix(node.profile.performance.decode.padded_rank)
        self._decoding: list[tuple[int, int, Job]] = []
        """heap of decoding rows as (number of the row's last step, order of insertion, job)"""
        self._prompts: list[Prompt] = []
        self._steps, self._contexts, self._order, self._total = 0, 0, 0, 0.0
        self._now = _boundary(node, now)
        self._take_over(node, now)
        self._queue = [Prompt(job, job.remaining, self._now) for job in node.queue]
        if extra is not None:
            self._queue.append(Prompt(extra, extra.prompt, _ready(node, now, extra)))
        self._queue.reverse()

    def total(self) -> float:
        """Simulates all requests to their ends, and returns the sum of their seconds per token."""
        while self._decoding or self._prompts or self._queue:
            while self._queue and len(self._decoding) + len(self._prompts) < self._profile.max_rows:
                self._prompts.append(self._queue.pop())
            chunks = self._chunks() if self._prompts else []
            if chunks:
                self._pass(chunks)
            elif self._decoding:
                self._run()
            else:
                self._now = min(prompt.ready for prompt in self._prompts)
        return self._total

    def _take_over(self, node: SimulatedNode, now: float) -> None:
        computing, chunks = int(node.iteration_end != inf), dict(node.chunks)
        for job in node.running:
            if job.finish_step:
                self._decode(job, job.output - node.tokens(job, now) - computing)
            elif not job.remaining:
                self._decode(job, job.output - job.generated)
            elif job.remaining == chunks.get(job):
                self._decode(job, job.output - job.generated - 1)
            else:
                ready = self._now if job.entry is None or job.entry.ready else _ready(node, now, job)
                self._prompts.append(Prompt(job, job.remaining - chunks.get(job, 0), ready))

    def _decode(self, job: Job, remaining: int) -> None:
        """Adds the job to the decoding rows with `remaining` output tokens. A job with none has ended."""
        if remaining <= 0:
            self._total += (self._now - job.at) / job.output
            return
        self._order += 1
        heappush(self._decoding, (self._steps + remaining, self._order, job))
        self._mix.add(job.digest, job.rank)
        self._contexts += job.prompt + job.output - remaining

    def _chunks(self) -> list[tuple[Prompt, int]]:
        budget, chunks = max(self._profile.chunk_tokens - len(self._decoding), 1), list[tuple[Prompt, int]]()
        for prompt in self._prompts:
            if budget and prompt.ready <= self._now:
                chunks.append((prompt, min(prompt.remaining, budget)))
                budget -= chunks[-1][1]
        return chunks

    def _pass(self, chunks: list[tuple[Prompt, int]]) -> None:
        """Simulates a decode step together with chunks of prompts."""
        model = self._profile.performance
        seconds = model.prefill.seconds(
            sum(length for _, length in chunks),
            sum(length * length for _, length in chunks),
            sum(length * counted_rank(prompt.job.rank, model.prefill.padded_rank) for prompt, length in chunks),
        )
        if self._decoding:
            seconds += self._step()
            if self._profile.one_pass:
                seconds -= min(model.prefill.base, model.decode.base)
        self._now += seconds
        self._advance(1)
        for prompt, length in chunks:
            prompt.remaining -= length
            if not prompt.remaining:
                self._prompts.remove(prompt)
                self._decode(prompt.job, prompt.job.output - prompt.job.generated - 1)

    def _run(self) -> None:
        """Simulates decode steps until a request ends or a prompt is ready."""
        growth = self._profile.performance.decode.per_context * len(self._decoding)
        run = DecodeRun(self._now, self._step(), growth, self._decoding[0][0] - self._steps)
        if self._prompts:
            run.cut(min(prompt.ready for prompt in self._prompts))
        self._now = run.end
        self._advance(run.steps)

    def _step(self) -> float:
        return self._profile.performance.decode.seconds(len(self._decoding), self._contexts, self._term(self._mix))

    def _advance(self, steps: int) -> None:
        self._steps += steps
        self._contexts += steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            job = heappop(self._decoding)[2]
            self._mix.remove(job.digest, job.rank)
            self._contexts -= job.prompt + job.output
            self._decode(job, 0)


def _boundary(node: SimulatedNode, now: float) -> float:
    if node.run is not None:
        return node.run.begin + node.run.seconds(min(node.run.steps, node.run.done_by(now) + 1))
    return now if node.iteration_end == inf else node.iteration_end


def _ready(node: SimulatedNode, now: float, job: Job) -> float:
    if node.loads.is_ready(job):
        return now
    model = node.profile.performance
    return now + model.exposed_share * model.to_device.seconds(node.loads.loading_bytes + job.bytes)
