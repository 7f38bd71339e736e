"""Forecasts of the costs of cold chunks and decode rows, by a node's profile and by the times of earlier passes."""

from __future__ import annotations

import numpy as np

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.costs import result_bytes
from node_agent.coldstart.learning import Correction, LearntLink, engine_correction
from node_agent.coldstart.planner import ChunkCosts, Contention, DecodeCosts, longest_step
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.row_costs import RowCosts
from node_agent.coldstart.workers import WorkerPool
from node_agent.leases import LayerState, Lease

NO_WAIT = 0.02
"""Share of the time of the base model's products, which overlap with the workers' computation. A chunk that waited less
than this share for workers counts as not having waited."""
MAX_CROSSING_S = 0.1
"""Maximum seconds that the bytes of one handoff may take on the link. For longer ones workers are not used, since a
wait for them is bounded."""


class CostForecasts:
    """Forecasts of how long layers, loads and CPU workers take. Measured times correct later forecasts."""

    def __init__(self, store: AdapterStore, base: BaseModel) -> None:
        """Starts without a profile and without workers."""
        self.store, self.base = store, base
        self.profile: Profile | None = None
        self.workers: WorkerPool | None = None
        self.link: LearntLink | None = None
        """Cost of the link to the device. It is set together with the profile."""
        self.row_cpu = Correction()
        """Factor by which the forecast of the workers' time for decode rows is corrected."""
        self.device = engine_correction()
        """Factor by which the forecast of the engine's time for layers is corrected. It is 1 on a GPU, where the engine
        does not see the device's time."""

    @property
    def assists(self) -> bool:
        """Returns whether CPU workers can take work now."""
        return self.workers is not None and self.workers.usable > 0

    def costs(self, lease: Lease, n_tokens: int, profile: Profile) -> ChunkCosts:
        """Returns the costs of a chunk of `n_tokens` tokens, by the profile and the recent speed of the link. The link
        is shared by the loads that are now in progress."""
        assert self.link is not None  # set together with the profile
        layout, layers, link = self.store.layout(lease), self.base.num_layers, self.link.cost
        sharing = max(1, self.store.loads_in_flight)
        load, in_host = np.zeros(layers), np.zeros(layers)
        for layer in range(layers):
            state = self.store.state(lease, layer)
            if state != LayerState.DEVICE:
                load[layer] = sharing * layout.moved[layer] / link.bandwidth
            if state == LayerState.NO:
                in_host[layer] = self.store.host_seconds(lease, layer)
        usable = self.workers.usable if self.workers is not None else 0
        cpu = self.worker_seconds(profile, layout, n_tokens, usable, sharing)
        results = self._result_seconds(lease, n_tokens)
        return ChunkCosts(self.layer_seconds(n_tokens, profile), cpu, load, in_host, results, link.latency)

    def layer_seconds(self, n_tokens: int, profile: Profile) -> float:
        """Returns the seconds of one layer of a chunk of `n_tokens` tokens on the device, at the host's recent
        speed."""
        return self.device.value * profile.layer_seconds(n_tokens)

    def worker_seconds(
        self, profile: Profile, layout: AdapterLayout, n_tokens: int, workers: int, sharing: int = 1
    ) -> np.ndarray:
        """Returns f64[N layers]: seconds of each layer if `workers` workers compute its LoRA term while `sharing` loads
        use the link.

        A value is infinite without workers. It is infinite also if the results have as many bytes as the weights, since
        workers would then only cause delay, and if a transfer takes longer than MAX_CROSSING_S.
        """
        if not workers or profile.cpu is None:
            return np.full(len(layout.layers), np.inf)
        row_bytes = n_tokens * self.store.pool.data.element_size()
        costs, slowdown = RowCosts(profile, self.base), 1.0
        on_cpu = self.store.pool.data.device.type == "cpu"
        if on_cpu and self.workers is not None and self.workers.engine_cores is not None:
            slowdown = self.workers.engine_cores.slowdown
        work, base_s = costs.slices(layout, n_tokens, workers), self.device.value * costs.base_seconds(n_tokens)
        longer = np.where(work > 0, np.maximum(work, slowdown * base_s) - base_s, 0.0).sum(axis=1)
        crossings = costs.crossings(layout, row_bytes, sharing)
        seconds = self.layer_seconds(n_tokens, profile) + longer + crossings.sum(axis=1)
        seconds[(crossings > MAX_CROSSING_S).any(axis=1)] = np.inf
        if profile.handoff is not None:
            moved = np.array(layout.moved)
            seconds[(moved > 0) & (result_bytes(layout, self.base, row_bytes) >= moved)] = np.inf
        by_layer: np.ndarray = seconds
        return by_layer

    def _result_seconds(self, lease: Lease, rows: int) -> np.ndarray:
        """Returns f64[N]: for each of N layers, the seconds by which the workers' results delay the adapter's load.

        Results for `rows` rows cross the same link to the device as the load. All values are 0 where workers share the
        device's memory.
        """
        if self.profile is None or self.profile.handoff is None or self.link is None:
            return np.zeros(self.base.num_layers)
        row_bytes = rows * self.store.pool.data.element_size()
        return result_bytes(self.store.layout(lease), self.base, row_bytes) / self.link.cost.bandwidth

    def _row_work(self, lease: Lease, rows: int, costs: RowCosts) -> tuple[np.ndarray, np.ndarray]:
        """Returns two arrays f64[N layers, groups] for `rows` decode rows: the workers' corrected seconds, and the
        seconds of link transfers."""
        layout, row_bytes = self.store.layout(lease), rows * self.store.pool.data.element_size()
        crossings = costs.crossings(layout, row_bytes, self.store.loads_in_flight)
        return self.row_cpu.value * costs.work(layout, rows), crossings

    def _apart(self, costs: ChunkCosts, n_tokens: int, contention: Contention, profile: Profile) -> float:
        """Returns the total seconds that other requests lose if the chunk gets a separate pass.

        Other requests whose adapters are also loading count only if all the adapters would arrive in time to share a
        pass. This is assumed if a load that is alone on the link takes no longer than a warm prefill.
        """
        layers = self.base.num_layers
        load = costs.load.sum() / max(1, self.store.loads_in_flight)
        together = costs.in_host.max() + load <= layers * costs.device
        sharing = contention.other_requests if together else contention.ready
        return sharing * layers * profile.extra_seconds_apart(n_tokens, sharing)

    def _decode_costs(
        self, lease: Lease, costs: ChunkCosts, tokens: int, profile: Profile, while_loading: bool
    ) -> DecodeCosts:
        """Returns the costs of the decode steps after a chunk.

        With `while_loading`, some steps may be computed while the adapter is still loading. In these, CPU workers
        compute half of the layers that are still missing, on average.
        """
        rows, row_costs = 1 + costs.other_requests, RowCosts(profile, self.base)
        step = row_costs.step(rows)
        if not (while_loading and self.assists):
            return DecodeCosts(tokens, step, np.inf)
        work, crossings = self._row_work(lease, 1, row_costs)
        longer = (work - row_costs.base_seconds(rows)).clip(0.0).sum(axis=1) + crossings.sum(axis=1)
        half = float(longer[costs.load > 0].sum()) / 2
        results = 0.0 if costs.results is None else float(self._result_seconds(lease, 1)[costs.load > 0].sum()) / 2
        return DecodeCosts(
            tokens, step, half if half <= longest_step(step, 1, costs.other_requests) else np.inf, results
        )

    def _learn(self, correction: Correction, cpu: float, between: float, waited: float) -> None:
        """Updates a correction of the workers' time. `cpu`: forecast seconds; `between`: seconds of the base's
        products, which overlap with the workers; `waited`: seconds that the engine then waited. The actual time is
        `between` + `waited`. Does nothing on a GPU, where waits are invisible to the engine."""
        if self.store.pool.data.device.type == "cpu":
            correction.learn(cpu, between + waited, at_most=waited < NO_WAIT * between)

    def learn_load(self, size: int, seconds: float) -> None:
        """Corrects the cost of the link: in `seconds`, `size` bytes of all loads crossed it."""
        if self.link is not None:
            self.link.learn(size, seconds)

    def warm_seconds(self, tokens: int, layers: int) -> float:
        """Returns the seconds for `layers` layers of a chunk of `tokens` with weights on the device. Returns 0 without
        a profile."""
        return layers * self.profile.layer_seconds(tokens) if self.profile is not None else 0.0
