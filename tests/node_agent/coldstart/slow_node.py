"""A node whose stored profile says that its engine is slow, so that it has found no use for CPU workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.json_file import write_json
from node_agent.coldstart import cost_check
from node_agent.coldstart.auto_workers import TYPICAL, judge_link
from node_agent.coldstart.cold_starts import WorkersDecision
from node_agent.coldstart.cost_check import CostCheck
from node_agent.coldstart.profile import LinkCost, Profile, read_profile
from node_agent.config import LinkConfig
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.idle_work import manager_of, work_while_idle
from tests.support.local_engine import LocalEngine

SLOW = 200
"""How many times slower the stored profile's engine is: more than a busy host slows the test itself."""
LAYER_S = 4e-4
"""About what a layer of 64 tokens takes, in seconds; not measured, since a busy host would change the link with it."""
LOAD = 10
"""How many warm prefills the load of the judged adapter takes; so many that it does on a busy host, too."""
SIZES = {"adapter_memory": 4 << 20, "host_memory": 16 << 20, "kv_memory": 4 << 20}


def nobody_calls() -> bool:
    """Lets idle work go on. A node's start measures with another function, `never`."""
    return False


@dataclass
class SlowNode:
    """A node whose stored profile was measured on a busy host; on a true one it would judge workers worth a try."""

    engine: LocalEngine
    true: Profile
    file: Path

    @property
    def check(self) -> CostCheck:
        return manager_of(self.engine)._check

    @property
    def stored(self) -> Profile:
        profile = self.engine.engine.cold_start.profile
        assert profile is not None
        return read_profile(self.file, profile.key)

    def call(self, directory: Path) -> None:
        """A call from host memory, by which the node learns its engine's real speed."""
        adapter = self.engine.deploy(directory)
        for prompt in ([1, 2], list(range(5, 5 + TYPICAL.tokens))):
            self.engine.engine.store.discard(adapter.digest)
            self.engine.submit(prompt, 2, adapter, ignore_eos=True)
            self.engine.run()

    def learn_engine(self, factor: float) -> None:
        for _ in range(4):
            self.engine.engine.cold_start.device.learn(1.0, factor)

    def learn_link(self, slower: float) -> None:
        link = self.engine.engine.cold_start.link
        assert link is not None
        for _ in range(16):
            link.learn(1 << 24, slower * (1 << 24) / link.profile.bandwidth)

    def judge_link(self) -> WorkersDecision:
        """What a node with the present profile decides at its start."""
        profile = self.engine.engine.cold_start.profile
        assert profile is not None
        return judge_link(manager_of(self.engine).config, self.engine.engine.store, self.engine.base, profile)


@contextmanager
def slow_node(stories_dir: Path, load_stories: LoadModel, tmp_path: Path) -> Iterator[SlowNode]:
    def start(link: LinkConfig, file: Path, workers: int | None) -> LocalEngine:
        return LocalEngine(
            stories_dir, tmp_path / "registry", load=load_stories, dtype="float32", threads=1, load_link=link,
            profile=str(file), cpu_workers=workers, **SIZES,
        )  # fmt: skip

    file = tmp_path / "profile.json"
    with closing(start(LinkConfig(1e9), tmp_path / "first.json", 0)) as first:
        true = first.engine.cold_start.profile
        assert true is not None
        layer = tuple((tokens, LAYER_S * tokens / TYPICAL.tokens) for tokens, _ in true.layer)
        true = msgspec.structs.replace(true, layer=layer)
        layout = first.engine.store.pool.uniform_layout(first.base, TYPICAL.rank, TYPICAL.projections)
        load_s = LOAD * true.layer_seconds(TYPICAL.tokens) * first.base.num_layers
    link = LinkConfig(layout.live / load_s)
    key = msgspec.structs.replace(true.key, simulated_bandwidth=link.bandwidth)
    true = msgspec.structs.replace(true, key=key, link=LinkCost(0.0, link.bandwidth))
    layer = tuple((tokens, SLOW * seconds) for tokens, seconds in true.layer)
    write_json(msgspec.structs.replace(true, layer=layer), file)
    with closing(start(link, file, None)) as engine:
        assert engine.engine.cold_start.decision.count == 0, "the slow engine seems to hide each load"
        assert "little to gain" in engine.engine.cold_start.decision.reason and not work_while_idle(engine)
        yield SlowNode(engine, true, file)
        engine.assert_clean()


def gains(_times: object, count: int, link: WorkersDecision) -> WorkersDecision:
    return WorkersDecision(count, "they gain", link.figures)


def judge(node: SlowNode) -> None:
    """Lets the idle node measure a change often enough for another judgement."""
    for _ in range(cost_check.CONFIRMATIONS):
        node.check.pause.until = 0.0
        assert manager_of(node.engine).work(nobody_calls)
