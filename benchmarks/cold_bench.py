"""The engines of a cold-start study, and what is set on them for each of its variants.

One engine has every adapter on its device; the other begins with none there, behind the simulated link, and has a CPU
worker. The second column slows the worker: it repeats its work until worker time : prefill is as in the papers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.cold_peft import PeftRig
from benchmarks.cold_rig import Rig, make_adapters, warm_prefill
from benchmarks.dlora import MergingLora
from node_agent.adapter_memory.layout import ROW_ALIGN
from node_agent.coldstart.calibration import Calibration, Interrupted
from node_agent.coldstart.cold_starts import MODES, ColdStartMode, ColdStarts
from node_agent.coldstart.measure import SHORT, measure_cpu
from node_agent.coldstart.planner import PLANS
from node_agent.coldstart.profile import LinkCost, Profile
from node_agent.config import LinkConfig
from tests.support.local_engine import LocalEngine

LOAD_OVER_PREFILL = 0.68
"""Toppings: 30 ms to load a rank-64 adapter, 44 ms to compute 256 prompt tokens on a 7B."""
WORKER_OVER_PREFILL = 27 / 44
"""Toppings 7.2: CPU time of the adapter's part of a cold prefill, to the same 44 ms."""
TOKENS = 256
KV_BYTES, MEMORY = 640 << 20, 512 << 20


@dataclass(frozen=True)
class Variant:
    way: ColdStartMode
    cold: bool = True
    """runs on the engine whose adapters are not there"""
    repeats: str = "fast"
    """fast, slowed or fourfold: of the workers' work"""


PLAIN = {
    "cached": Variant(MODES["wait"], cold=False),
    "set_adapter": Variant(MODES["wait"], cold=False),
    "cached_all_cores": Variant(MODES["wait"], cold=False),
    "dlora": Variant(MODES["wait"], cold=False),
    "ondmd": Variant(ColdStartMode(("wait",), blocks=True)),
    "overlap": Variant(ColdStartMode(("wait",))),
    "pipeline": Variant(ColdStartMode(("pipeline",))),
}
ASSISTED = {"assist": ColdStartMode(("assist",), whole_adapter=True), "full": MODES["auto"]}
VARIANTS = PLAIN | {
    name + ("" if column == "fast" else f"_{column}"): Variant(way, repeats=column)
    for column in ("fast", "slowed", "fourfold")
    for name, way in ASSISTED.items()
}
"""Load, then prefill (our code path, as S-LoRA does it), and what is added to it one at a time. Without a suffix,
workers are as fast as here."""


class Bench:
    def __init__(self, model: Path, root: Path, seed: int, ranks: dict[int, int]) -> None:
        """`ranks`: how many adapters of each."""
        self.model, self._all_cores = model, os.sched_getaffinity(0)
        names = [rank for rank, count in ranks.items() for _ in range(count)]
        self.of_rank = {rank: [i for i, other in enumerate(names) if other == rank] for rank in ranks}
        """indices of the adapters"""
        paths = make_adapters(model, root / "adapters", names, seed)
        engine = self._engine(root / "cached", None)
        self.cached = Rig(engine, [engine.deploy(path) for path in paths])
        self.cached.fill_device(range(len(paths)))
        self.prefill = warm_prefill(self.cached, TOKENS)
        """seconds of 256 prompt tokens whose adapter is on the device"""
        size = self.bytes_of(64)
        self.link = LinkConfig(size / (LOAD_OVER_PREFILL * self.prefill))
        engine = self._engine(root / "cold", self.link)
        self._measure_workers(engine)
        self.cold = Rig(engine, [engine.deploy(path) for path in paths])
        self.dlora = MergingLora(self.cached.engine.engine)
        self._paths = paths

    @property
    def layers(self) -> int:
        return self.cached.engine.base.num_layers

    @cached_property
    def peft(self) -> PeftRig:
        return PeftRig(self.model, self._paths, torch.bfloat16)

    @property
    def profile(self) -> Profile:
        """Of the engine whose adapters are not there, its workers as fast as they are."""
        found = self._columns["fast"].profile
        assert found is not None
        return found

    def bytes_of(self, rank: int) -> int:
        """Of one adapter on its way to the device."""
        store = self.cached.engine.engine.store
        layout = store.device[self.cached.adapters[self.of_rank[rank][0]].digest].layout
        return ROW_ALIGN * sum(span.end - span.begin for spans in layout.spans for span in spans)

    @contextmanager
    def variant(self, name: str) -> Iterator[Rig | PeftRig]:
        """The engine that runs it, as it is to be, its device empty if the variant is a cold one."""
        chosen = VARIANTS[name]
        if name == "set_adapter":
            yield self.peft
            return
        if chosen.cold:
            self.set_cold(chosen.way, chosen.repeats)
            self.cold.forget_device()
            yield self.cold
            self._measure_kinds()
            return
        engine = self.cached.engine.engine
        start, cores = engine.start_lora, os.sched_getaffinity(0)
        try:
            if name == "dlora":
                engine.start_lora = self.dlora.start
            elif name == "cached_all_cores":
                os.sched_setaffinity(0, self._all_cores)
                torch.set_num_threads(len(self._all_cores))
            yield self.cached
        finally:
            engine.start_lora = start
            self.dlora.unmerge()
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(1)

    def _measure_kinds(self) -> None:
        """Measures kinds of calls that came, as an idle node does: later rounds may ask workers for them."""
        engine = self.cold.engine
        for kind in list(engine.engine.cold_start.unmeasured):
            with suppress(Interrupted):  # a kind that does not fit here is never assisted
                Calibration(engine.engine, engine.base).measure(kind, PLANS)
            del engine.engine.cold_start.unmeasured[kind]

    def set_cold(self, way: ColdStartMode, repeats: str) -> None:
        cold_start = self._columns[repeats]
        cold_start.mode = way
        assert cold_start.workers is not None
        cold_start.workers.memory.repeats = self.repeats[repeats]
        self.cold.engine.engine.cold.cold_start = cold_start

    def set_link(self, factor: float) -> None:
        """So many times the rate of the study's link. Nothing may be on its way."""
        rate = LinkConfig(self.link.bandwidth * factor)
        self.cold.engine.engine.store.loader.device_link.config = rate
        for cold_start in self._columns.values():
            assert cold_start.profile is not None
            cost = LinkCost(cold_start.profile.link.latency, rate.bandwidth)
            cold_start.use(msgspec.structs.replace(cold_start.profile, link=cost), cold_start.workers)

    def bring(self, adapters: Sequence[int]) -> None:
        """To the device of the engine that has none there, over a link that takes no time."""
        link = self.cold.engine.engine.store.loader.device_link
        config, link.config = link.config, None
        self.cold.fill_device(adapters)
        link.config = config

    def close(self) -> None:
        for rig in (self.cached, self.cold):
            rig.engine.close()

    def _engine(self, root: Path, link: LinkConfig | None) -> LocalEngine:
        settings: dict[str, Any] = {"cpu_workers": 0, "cold_start": "wait"}
        if link is not None:
            settings = {"cpu_workers": 1, "cold_start": "auto", "load_link": link}
        return LocalEngine(
            self.model, root, dtype="bfloat16", threads=1, adapter_memory=MEMORY,
            host_memory=MEMORY, kv_memory=KV_BYTES, **settings,
        )  # fmt: skip

    def _measure_workers(self, local: LocalEngine) -> None:
        """A profile for each slow-down; how much the papers' ratio takes follows from the first."""
        engine = local.engine
        found, assist = engine.cold_start, engine.assist
        assert found.profile is not None and assist is not None and assist.profile.cpu is not None
        layer = found.profile.layer_seconds(TOKENS)
        worker = found.profile.cpu_seconds(TOKENS, self._elements(local))
        slowed = max(1, round(WORKER_OVER_PREFILL * layer / worker))
        self.worker_over_prefill = worker / layer
        self.repeats = {"fast": 1, "slowed": slowed, "fourfold": 4 * slowed}
        self._columns: dict[str, ColdStarts] = {}
        for name, repeats in self.repeats.items():
            assist.workers.memory.repeats = repeats
            cpu = measure_cpu(engine.store, assist.workers, SHORT)
            if cpu is None:
                raise RuntimeError("the CPU worker does not answer")
            profile = msgspec.structs.replace(found.profile, cpu=cpu)
            self._columns[name] = ColdStarts(engine.store, local.base, found.mode, profile, assist.workers)

    def _elements(self, local: LocalEngine) -> int:
        """Weights of a rank-64 adapter's q, k and v in one layer."""
        return sum(64 * sum(local.base.widths[p]) for p in (0, 1, 2))
