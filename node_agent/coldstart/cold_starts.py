"""Plans cold prefills, decides how far each may advance, and corrects later plans by measured times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from adapters.base_model import BaseModel
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.assist import Assist, AssistedPass
from node_agent.coldstart.cold_lora import ON_DEVICE, ColdLora
from node_agent.coldstart.forecasts import CostForecasts
from node_agent.coldstart.learning import LearntLink, Outcome
from node_agent.coldstart.pass_times import CallKind, PassSample, PassTimes, kind_of
from node_agent.coldstart.planner import (
    ChunkCosts,
    Contention,
    choose,
    forecast,
    wait_seconds,
)
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.row_costs import JoinedStep, RowCosts, RowPart
from node_agent.coldstart.workers import WorkerPool
from node_agent.leases import LayerState, Lease
from node_agent.types import PassLora, Plan

MAX_OUTCOMES = 256
MAX_UNMEASURED = 16
"""Maximum kinds of calls that wait to be measured."""


@dataclass(frozen=True)
class ColdStartMode:
    """Plans that may be chosen. `blocks` and `whole_adapter` define baselines for benchmarks."""

    plans: tuple[str, ...]
    blocks: bool = False
    """whether nothing else is computed while an adapter loads; a baseline that imitates S-LoRA with this project's
    code"""
    whole_adapter: bool = False
    """whether the device computes no layer of an incompletely loaded adapter: CPU assistance without the pipeline"""
    decodes: bool = False
    """whether decode steps may be computed while the adapter is loading"""


PLAIN = ("wait", "pipeline")
"""Plans without CPU workers."""
MODES = {
    "auto": ColdStartMode((*PLAIN, "assist"), decodes=True),
    "wait": ColdStartMode(("wait",)),
    "pipeline": ColdStartMode(PLAIN),
    "assist": ColdStartMode(("assist",), decodes=True),
}
"""Plans that may be chosen for each value of `node.cold_start` in serverless.yml. PLAIN is the fallback where `assist`
is impossible."""


@dataclass(frozen=True)
class WorkersDecision:
    """Number of CPU workers of a node, and the reason."""

    count: int
    reason: str
    figures: tuple[tuple[str, float], ...] = ()
    """(name, milliseconds) of the measurements behind the decision"""


class ColdStarts(CostForecasts):
    """Planner of cold chunks, which are prompt chunks whose adapter is not on the device yet (docs/design/seams.md).
    Only the engine's thread calls it."""

    def __init__(
        self,
        store: AdapterStore,
        base: BaseModel,
        mode: ColdStartMode,
        profile: Profile | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        """Plans with this profile and these workers. Without a profile, the plan is always `wait`."""
        super().__init__(store, base)
        self.mode = mode
        self.times = PassTimes()
        self.unmeasured: dict[CallKind, None] = {}
        """Kinds of calls that workers may help, by the profile or by few measured passes. They are measured while the
        node is idle."""
        self.unmeasurable: set[CallKind] = set()
        """Kinds of calls that this node has no room to measure. Workers are never used for them."""
        self.learns = True
        """True if finished passes correct later forecasts. False during a measurement, which records its own passes."""
        self.assist: Assist | None = None
        """Opens the assisted part of cold passes; None without workers."""
        self.use(profile, workers)
        self.decision = WorkersDecision(0, "")
        self.outcomes: deque[Outcome] = deque(maxlen=MAX_OUTCOMES)
        self.latest: Plan | None = None

    def use(self, profile: Profile | None, workers: WorkerPool | None) -> None:
        """Replaces the profile and the workers for later plans."""
        self.profile, self.workers = profile, workers
        if profile is not None:
            self.times = PassTimes(profile.passes)
            self.link = LearntLink(profile.link)
            if self.store.pool.data.is_cuda:
                self.store.loader.bandwidth = profile.link.bandwidth
        if profile is None or workers is None:
            self.assist = None
        elif self.assist is None or self.assist.workers is not workers:
            self.assist = Assist(self.store, self.base, profile, workers)
        else:
            self.assist.profile = profile

    def plan(self, lease: Lease, n_tokens: int, contention: Contention) -> Plan:
        """Returns the plan for a chunk of `n_tokens` tokens that starts now. Sets the order in which the adapter's
        layers are loaded accordingly."""
        if self.profile is None:
            return Plan("wait")
        costs = self.costs(lease, n_tokens, self.profile)
        apart = self._apart(costs, n_tokens, contention, self.profile)
        costs = replace(costs, ahead=contention.ahead, other_requests=contention.other_requests, apart=apart)
        if contention.decodes:
            costs = replace(
                costs, decode=self._decode_costs(lease, costs, contention.decodes, self.profile, self.mode.decodes)
            )
        kind = kind_of(self.store.layout(lease), n_tokens)
        choice = choose(costs, self._allowed(kind, costs), partial(self.times.bounds, kind))
        if choice.undecided and self.times.may_narrow(kind, "assist"):
            self._record_unmeasured(kind)
        if choice.name != "wait":
            self.store.set_order(lease, choice.order(self.base.num_layers))
        joins = costs.decode is not None and np.isfinite(costs.decode.longer)
        self.latest = Plan(
            choice.name,
            choice.assisted,
            choice.exposed,
            tuple((costs.cpu - costs.device).tolist()),
            tuple(costs.load.tolist()),
            choice.seconds,
            max(0.0, choice.loaded - choice.seconds) if contention.decodes and not joins else 0.0,
            contention.other_requests,
            self._alone_seconds(costs, choice.name, choice.assisted),
        )
        return self.latest

    def _allowed(self, kind: CallKind, costs: ChunkCosts) -> tuple[str, ...]:
        """Returns the plans that may be chosen for a chunk of this kind. `assist` requires that the kind was measured;
        if it seems better by the profile alone, the kind is recorded for measurement."""
        plain = tuple(name for name in self.mode.plans if name in PLAIN)
        if "assist" not in self.mode.plans or not self.assists:
            return plain or PLAIN
        if not plain or self.times.is_measured(kind):
            return self.mode.plans if plain or np.isfinite(costs.cpu).any() else PLAIN
        if choose(costs).name == "assist":
            self._record_unmeasured(kind)
        return plain

    def _record_unmeasured(self, kind: CallKind) -> None:
        """Schedules a measurement of this kind of call for when the node is idle."""
        if kind not in self.unmeasurable and len(self.unmeasured) < MAX_UNMEASURED:
            self.unmeasured.setdefault(kind)

    def _alone_seconds(self, costs: ChunkCosts, name: str, assisted: int) -> float:
        """Returns the chunk's forecast seconds by the profile alone, if it does not share the engine or the link.
        Returns 0 otherwise, or if the adapter is not in host memory yet."""
        if (
            costs.other_requests
            or costs.ahead
            or costs.in_host.any()
            or self.store.loads_in_flight > 1
            or not costs.load.any()
        ):
            return 0.0
        return wait_seconds(costs) if name == "wait" else float(forecast(costs)[0][assisted])

    def without_workers(self, lease: Lease, plan: Plan) -> Plan:
        """Returns the fallback for an `assist` plan without a free worker: `pipeline`, with all layers loaded in
        order."""
        self.store.set_order(lease, range(self.base.num_layers))
        return replace(plan, name="pipeline", assisted=0)

    def lora(self, lease: Lease, on_device: PassLora, workers: AssistedPass | None) -> ColdLora:
        """Returns the LoRA for rows of a leased adapter that is loading. `on_device` computes the layers that have
        arrived."""
        return ColdLora(
            on_device,
            partial(self.state, lease),
            self.store.layout(lease).adapts,
            workers,
            partial(self.store.await_copy, lease),
        )

    def joining(self, waiting: Iterable[tuple[Lease, int]], other_requests: int) -> set[str]:
        """Returns the digests of loading adapters whose rows join the next decode step. A row joins if it need not wait
        for a layer, and if all requests together gain time by it.

        `waiting`: each loading adapter that has rows to decode, and the number of these rows. `other_requests`: number
        of requests that a longer step would delay.
        """
        chosen: set[str] = set()
        if self.profile is None or not self.mode.decodes:
            return chosen
        step = JoinedStep(RowCosts(self.profile, self.base), self.workers.usable if self.workers else 0, other_requests)
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
        results = float(self._result_seconds(lease, rows)[states == LayerState.HOST].sum())
        return RowPart(rows, work, float(crossings.sum()), arriving, float(load.sum()), results)

    def can_step(self, lease: Lease) -> bool:
        """Returns whether a pass could be completed now: each layer is on the device or can be computed by workers."""
        layers = self.base.num_layers
        return self.ready_until(lease, Plan("assist", layers), 0) == layers

    def on_device(self, lease: Lease) -> bool:
        """Returns whether all layers of the leased adapter are on the device, or their copies enqueued."""
        return all(self.state(lease, layer) in ON_DEVICE for layer in range(self.base.num_layers))

    def observe_joined(self, joined: Sequence[tuple[Lease, int, ColdLora]]) -> None:
        """Corrects the forecast of the workers' time by the decode rows of adapters that joined one step.

        The workers computed the rows of all these adapters during one base product, so the adapter served last waited
        for the earlier ones.
        """
        if self.profile is None or self.workers is None or not self.assists:
            return
        costs, layers = RowCosts(self.profile, self.base), self.base.num_layers
        parts = [(costs.work(self.store.layout(lease), rows), lora) for lease, rows, lora in joined]
        served = max(1, min(self.workers.usable, len(parts)))  # the last worker may have exited meanwhile
        work = sum(lora.layers_on_cpu / layers * each for each, lora in parts) / served
        share = max(lora.layers_on_cpu for _, lora in parts) / layers
        between = share * np.where(work > 0, costs.base_seconds(sum(rows for _, rows, _ in joined)), 0.0)
        self._learn(self.row_cpu, float(np.sum(work)), float(between.sum()), sum(lora.waited for _, lora in parts))

    def observe(self, lease: Lease, outcome: Outcome) -> None:
        """Corrects later forecasts by the planned and measured times of a computed chunk."""
        self.outcomes.append(outcome)
        if self.profile is not None and not outcome.other_requests and self.store.pool.data.device.type == "cpu":
            self.device.learn(self.base.num_layers * self.profile.layer_seconds(outcome.tokens), outcome.computed)
        if self.learns and outcome.by_profile:
            kind = kind_of(self.store.layout(lease), outcome.tokens)
            self.times.add(PassSample(kind, outcome.plan, outcome.by_profile, outcome.seconds))

    def ready_until(self, lease: Lease, plan: Plan, layer: int) -> int:
        """Returns the number of the first layer, from `layer` on, that a pass of this plan cannot compute now. Returns
        the number of layers if it can compute all."""
        layers = self.base.num_layers
        if self.store.loaded(lease):
            return layers
        while layer < layers and self._computable(lease, plan, layer):
            layer += 1
        return layer

    def state(self, lease: Lease, layer: int) -> int:
        """Returns the layer's LayerState as this node's mode sees it. With `whole_adapter`, layers on the device count
        as in host memory until all are loaded."""
        state = self.store.state(lease, layer)
        if state in ON_DEVICE and self.mode.whole_adapter and not self.store.loaded(lease):
            return LayerState.HOST
        return state

    def _computable(self, lease: Lease, plan: Plan, layer: int) -> bool:
        state = self.state(lease, layer)
        return state in ON_DEVICE or (state == LayerState.HOST and self.on_cpu(lease, plan, layer))

    def on_cpu(self, lease: Lease, plan: Plan, layer: int) -> bool:
        """Returns whether CPU workers compute a layer in host memory, rather than the pass waiting for its copy."""
        if plan.name != "assist" or not self.assists:
            return False
        if layer < plan.assisted or self.mode.whole_adapter:
            return True
        # a layer that should have arrived by now: compare with the remaining load time up to it
        load_s = sum(
            plan.load[i] for i in range(plan.assisted, layer + 1) if self.store.state(lease, i) != LayerState.DEVICE
        )
        return bool((1 + plan.other_requests) * plan.cpu_extra[layer] < load_s)
