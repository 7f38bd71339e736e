"""How cold chunks get their adapters on this node: plans them, says how far each may go, and keeps what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.assist import Assist, AssistedPass
from node_agent.coldstart.cold_lora import ON_DEVICE, ColdLora
from node_agent.coldstart.learning import Correction, Outcome
from node_agent.coldstart.planner import ChunkCosts, Contention, arrivals, choose, longest_step
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.row_costs import JoinedStep, RowCosts, RowPart
from node_agent.coldstart.workers import WorkerPool
from node_agent.types import LayerState, Lease, PassLora, Plan

MOST_OUTCOMES = 256
LEAST_LOAD_S = 1e-3
"""Shorter loads tell of threads waking up, and nothing of the link."""
NO_WAIT = 0.02
"""Workers count as on time if the chunk waited less than this share of the base's products, beside which they
compute."""


@dataclass(frozen=True)
class Way:
    """Which plans may be chosen. `blocks` and `whole` make the baselines that benchmarks compare with."""

    plans: tuple[str, ...]
    blocks: bool = False
    """Nothing else is computed while an adapter loads (our code path, as S-LoRA does it)."""
    whole: bool = False
    """The device computes nothing of an adapter that is not wholly there: the CPU without the pipeline."""
    decodes: bool = False
    """Decode steps are computed while the adapter is on its way."""


WAYS = {
    "auto": Way(("wait", "pipeline", "assist"), decodes=True),
    "wait": Way(("wait",)),
    "pipeline": Way(("wait", "pipeline")),
    "assist": Way(("assist", "pipeline", "wait"), decodes=True),
}
"""`node.cold_start` in serverless.yml: the plans that may be chosen. Where `assist` is impossible the others do."""


@dataclass(frozen=True)
class WorkersDecision:
    """How many CPU workers a node has."""

    count: int
    reason: str
    """For operators."""


class ColdStarts:
    """Plans cold chunks (docs/design/seams.md). Called by the engine's thread alone."""

    def __init__(
        self,
        store: AdapterStore,
        base: BaseModel,
        way: Way,
        profile: Profile | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        """Plans by the profile, with these workers; without a profile every plan is `wait`."""
        self.store, self.base, self.way = store, base, way
        self.use(profile, workers)
        self.decision = WorkersDecision(0, "")
        self.cpu, self.row_cpu, self.link = Correction(), Correction(), Correction()
        """of the profile's costs of workers, by chunks and by decode rows, and of the link, as they are lately"""
        self.outcomes: deque[Outcome] = deque(maxlen=MOST_OUTCOMES)

    def use(self, profile: Profile | None, workers: WorkerPool | None) -> None:
        """Plan by the profile from now on, with these workers."""
        self.profile, self.workers = profile, workers
        if profile is not None and self.store.pool.data.is_cuda:
            self.store.loader.bandwidth = profile.link.bandwidth
        self.assist = None if profile is None or workers is None else Assist(self.store, self.base, profile, workers)
        """What cold passes need of the workers; None where there are none."""

    @property
    def assists(self) -> bool:
        """CPU workers can take work now."""
        return self.workers is not None and self.workers.usable > 0

    def plan(self, lease: Lease, n_tokens: int, contention: Contention) -> Plan:
        """Choose for a chunk of `n_tokens` that is about to begin, and load in the order that this wants."""
        if self.profile is None:
            return Plan("wait")
        others, costs = contention.others, self.costs(lease, n_tokens, self.profile)
        apart = self._apart(costs, n_tokens, contention, self.profile)
        costs = replace(costs, ahead=contention.ahead, others=others, apart=apart)
        if contention.decodes:
            costs = replace(costs, decodable=self._decodable(lease, costs, self.profile))
        possible = tuple(name for name in self.way.plans if name != "assist" or self.assists)
        choice = choose(costs, possible or ("wait",))
        if choice.name != "wait":
            self.store.set_order(lease, choice.order(self.base.num_layers))
        return Plan(
            choice.name,
            choice.assisted,
            choice.exposed,
            tuple((costs.cpu - costs.device).tolist()),
            tuple(costs.load.tolist()),
            choice.seconds,
            max(0.0, costs.decodable - choice.seconds),
            others,
            float(costs.load.sum()) / self.link.value,
        )

    def _apart(self, costs: ChunkCosts, n_tokens: int, contention: Contention, profile: Profile) -> float:
        """Returns the seconds that the others together lose by a pass of the chunk's own. Those whose adapters are on
        their way, too, count where all are there before they could be computed: where a load that has the link alone
        takes no longer than a warm prefill."""
        layers = self.base.num_layers
        load = costs.load.sum() / max(1, self.store.loads_in_flight)
        together = costs.in_host.max() + load <= layers * costs.device
        sharing = contention.others if together else contention.ready
        return sharing * layers * profile.apart_seconds(n_tokens, sharing)

    def _decodable(self, lease: Lease, costs: ChunkCosts, profile: Profile) -> float:
        """Returns the seconds from now until rows of the adapter may decode: all is there, or the workers' part of what
        is not lengthens the others' steps little."""
        arrived = arrivals(costs)
        if not (self.way.decodes and self.assists):
            return float(arrived[-1])
        rows, row_costs = 1 + costs.others, RowCosts(profile, self.base)
        work, crossings = self._row_work(lease, 1, row_costs)
        longer = (work - row_costs.beside(rows)).clip(0.0).sum(axis=1) + crossings.sum(axis=1)
        longer[costs.load == 0] = 0.0
        most = longest_step(row_costs.step(rows), 1, costs.others)
        rest = np.append(np.cumsum(longer[::-1])[::-1][1:], 0.0)  # of the layers behind each one
        ready = float(arrived[np.argmax(rest <= most)]) if longer.sum() > most else 0.0
        return max(ready, float(costs.in_host.max()))

    def _row_work(self, lease: Lease, rows: int, costs: RowCosts) -> tuple[np.ndarray, np.ndarray]:
        """Returns the workers' seconds for so many decode rows, as they are lately, and those of crossings."""
        layout, row_bytes = self.store.layout(lease), rows * self.store.pool.data.element_size()
        return self.row_cpu.value * costs.work(layout, rows), costs.crossings(layout, row_bytes)

    def without_workers(self, lease: Lease, plan: Plan) -> Plan:
        """Returns what an `assist` plan becomes where no worker can be had after all: every layer is loaded."""
        self.store.set_order(lease, range(self.base.num_layers))
        return replace(plan, name="pipeline", assisted=0)

    def lora(self, lease: Lease, on_device: PassLora, workers: AssistedPass | None) -> ColdLora:
        """Returns the LoRA of rows of a leased adapter that is on its way; `on_device` adds layers that are there."""
        return ColdLora(
            on_device,
            partial(self.state, lease),
            self.store.layout(lease).adapts,
            workers,
            partial(self.store.await_copy, lease),
        )

    def warm_seconds(self, tokens: int, layers: int) -> float:
        """Returns the seconds for `layers` layers of a chunk of `tokens` whose weights are on the device; 0 without a
        profile."""
        return layers * self.profile.layer_seconds(tokens) if self.profile is not None else 0.0

    def joining(self, waiting: Iterable[tuple[Lease, int]], others: int) -> set[str]:
        """Returns the digests of adapters whose rows go along with the next decode step, though they are on their way:
        they need not wait for a layer, and all requests together gain by it. `waiting`: each adapter that has rows to
        decode, with their number; `others`: requests that are held up by as much as the step takes longer."""
        chosen: set[str] = set()
        if self.profile is None or not self.way.decodes:
            return chosen
        step = JoinedStep(RowCosts(self.profile, self.base), self.workers.usable if self.workers else 0, others)
        for lease, rows in waiting:
            if not step.full and self.can_step(lease) and step.join(self._row_part(lease, rows, self.profile)):
                chosen.add(lease.digest)
        return chosen

    def _row_part(self, lease: Lease, rows: int, profile: Profile) -> RowPart:
        states = np.array([self.state(lease, layer) for layer in range(self.base.num_layers)])
        load = self.costs(lease, rows, profile).load
        for_workers = (states == LayerState.HOST)[:, None]
        work, crossings = (
            np.where(for_workers, each, 0.0) for each in self._row_work(lease, rows, RowCosts(profile, self.base))
        )
        arriving = float(load[states == LayerState.ENQUEUED].sum())
        return RowPart(rows, work, float(crossings.sum()), arriving, float(load.sum()))

    def can_step(self, lease: Lease) -> bool:
        """Returns whether a pass could be computed to its end now: each layer is on the device or can be computed by
        the workers."""
        layers = self.base.num_layers
        return self.ready_until(lease, Plan("assist", layers), 0) == layers

    def on_device(self, lease: Lease) -> bool:
        """Returns whether each layer is on the device, or its copy enqueued there."""
        return all(self.state(lease, layer) in ON_DEVICE for layer in range(self.base.num_layers))

    def observe_joined(self, joined: Sequence[tuple[Lease, int, ColdLora]]) -> None:
        """Learn from the decode rows, so many of each adapter, that joined one step. The workers served all of them
        beside one product of the base, and whoever was served last waited for those before."""
        if self.profile is None or self.workers is None or not self.assists:
            return
        costs, layers = RowCosts(self.profile, self.base), self.base.num_layers
        parts = [(costs.work(self.store.layout(lease), rows), lora) for lease, rows, lora in joined]
        served = max(1, min(self.workers.usable, len(parts)))  # the last worker may have ended meanwhile
        work = sum(lora.layers_on_cpu / layers * each for each, lora in parts) / served
        share = max(lora.layers_on_cpu for _, lora in parts) / layers
        between = share * np.where(work > 0, costs.beside(sum(rows for _, rows, _ in joined)), 0.0)
        self._learn(self.row_cpu, float(np.sum(work)), float(between.sum()), sum(lora.waited for _, lora in parts))

    def observe(self, lease: Lease, outcome: Outcome) -> None:
        """Learn from a chunk of the leased adapter that was computed."""
        self.outcomes.append(outcome)
        if self.profile is None or self.workers is None or not self.assists or not outcome.layers_cpu:
            return
        costs, share = RowCosts(self.profile, self.base), outcome.layers_cpu / self.base.num_layers
        layout = self.store.layout(lease)
        work = costs.slices(layout, outcome.tokens, self.workers.usable)
        between = share * float(np.where(work > 0, costs.beside(outcome.tokens), 0.0).sum())
        if self._on_cpu:
            self._learn(self.cpu, share * float(work.sum()), between, outcome.waited)
        elif not outcome.others:  # the device waited where the engine can't see it: what the chunk took longer for
            warm = self.warm_seconds(outcome.tokens, self.base.num_layers)
            crossings = share * costs.crossings(layout, outcome.tokens * self.store.pool.data.element_size()).sum()
            longer = max(0.0, outcome.seconds - outcome.exposed - warm - float(crossings))
            self.cpu.learn(share * float(work.sum()), between + longer, at_most=longer <= NO_WAIT * between)

    def _learn(self, correction: Correction, cpu: float, between: float, waited: float) -> None:
        """Learns that workers who were to take `cpu` seconds had the `between` ones of the base's products, and
        `waited` more. On a device with a stream it learns nothing: that waits where the engine can't see it."""
        if self._on_cpu:
            correction.learn(cpu, between + waited, at_most=waited < NO_WAIT * between)

    @property
    def _on_cpu(self) -> bool:
        return self.store.pool.data.device.type == "cpu"

    def observe_load(self, forecast: float, seconds: float) -> None:
        """Learn from the rest of a load whose adapter lay in host memory; `forecast` by the profile alone."""
        if forecast > LEAST_LOAD_S:
            self.link.learn(forecast, seconds)

    def ready_until(self, lease: Lease, plan: Plan, layer: int) -> int:
        """Layers that a pass of this plan, which stands before `layer`, may be advanced to."""
        layers = self.base.num_layers
        if self.store.loaded(lease):
            return layers
        while layer < layers and self._computable(lease, plan, layer):
            layer += 1
        return layer

    def state(self, lease: Lease, layer: int) -> int:
        """A LayerState, as far as this node's way makes use of it."""
        found = self.store.state(lease, layer)
        if found in ON_DEVICE and self.way.whole and not self.store.loaded(lease):
            return LayerState.HOST
        return found

    def _computable(self, lease: Lease, plan: Plan, layer: int) -> bool:
        state = self.state(lease, layer)
        return state in ON_DEVICE or (state == LayerState.HOST and self.on_cpu(lease, plan, layer))

    def on_cpu(self, lease: Lease, plan: Plan, layer: int) -> bool:
        """Whether a layer that lies in host memory is computed by the workers rather than waited for."""
        if plan.name != "assist" or not self.assists:
            return False
        if layer < plan.assisted or self.way.whole:
            return True
        # it should have been on the device by now: what comes before it in the load has to arrive first
        left = sum(
            plan.load[i] for i in range(plan.assisted, layer + 1) if self.store.state(lease, i) != LayerState.DEVICE
        )
        return bool((1 + plan.others) * plan.cpu_extra[layer] < left)

    def costs(self, lease: Lease, n_tokens: int, profile: Profile) -> ChunkCosts:
        """Returns what each layer of the chunk costs by the profile, corrected by what was observed lately and with the
        link shared as it is now."""
        layout, layers = self.store.layout(lease), self.base.num_layers
        per_byte = max(1, self.store.loads_in_flight) * self.link.value / profile.link.bandwidth
        load, in_host = np.zeros(layers), np.zeros(layers)
        for layer in range(layers):
            state = self.store.state(lease, layer)
            if state != LayerState.DEVICE:
                load[layer] = layout.moved[layer] * per_byte
            if state == LayerState.NO:
                in_host[layer] = self.store.host_seconds(lease, layer)
        usable = self.workers.usable if self.workers is not None else 0
        cpu = self.worker_seconds(profile, layout, n_tokens, usable) if usable else np.full(layers, np.inf)
        latency = profile.link.latency if load.any() else 0.0
        return ChunkCosts(profile.layer_seconds(n_tokens), cpu, load, in_host, latency)

    def worker_seconds(self, profile: Profile, layout: AdapterLayout, n_tokens: int, workers: int) -> np.ndarray:
        """Returns f64[N]: the seconds of each layer whose adapter part so many workers compute, as they are lately."""
        costs = RowCosts(profile, self.base)
        work = self.cpu.value * costs.slices(layout, n_tokens, workers)
        longer = (work - costs.beside(n_tokens)).clip(0.0).sum(axis=1)
        crossings = costs.crossings(layout, n_tokens * self.store.pool.data.element_size()).sum(axis=1)
        seconds: np.ndarray = profile.layer_seconds(n_tokens) + crossings + longer
        return seconds
