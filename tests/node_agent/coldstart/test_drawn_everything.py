"""Cold starts, workers that fail, forecasts, provisioned copies, operators and tight memory, all at drawn times: tokens
are PEFT's, memory is as its books say after each step, and at the end nothing is held."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cluster.residency import WantedAdapter, WantedResidency
from node_agent.adapter_memory.integrity import check_memory
from node_agent.config import DiskCacheConfig, LinkConfig
from node_agent.cores import spare_cores
from node_agent.engine import prefetcher
from node_agent.ipc import Evict, ListAdapters, Prefetch
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.kept import as_started
from tests.support.exact import Case, Tally, check
from tests.support.forced import DrawnLink, force
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import PeftReference

CALLS = 40
CLASSES = ("strict", "standard", "standard", "best_effort")
pytestmark = pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")


class Chaos:
    """Who else acts on the engine's adapters, between two of its steps."""

    def __init__(self, engine: LocalEngine, cases: list[Case], rng: random.Random) -> None:
        self.engine, self.cases, self.rng = engine, cases, rng
        self.asked = 0

    def act(self) -> None:
        engine, rng = self.engine.engine, self.rng
        adapter = rng.choice(self.cases).adapter
        assert adapter is not None
        self.asked += 1
        match rng.choice(["want", "want", "prefetch", "evict", "list", "rest", "discard", "gone"]):
            case "want":
                engine.prefetcher.want(self._wanted())
            case "prefetch":
                engine.orders.take(Prefetch(f"p{self.asked}", adapter))
            case "evict":
                engine.orders.take(Evict(f"e{self.asked}", adapter.digest))
            case "list":
                engine.orders.take(ListAdapters(f"l{self.asked}"))
            case "rest":
                engine.prefetcher._rests.clear()
            case "discard":
                engine.store.discard(adapter.digest)
            case "gone":
                engine.prefetcher.clear()

    def _wanted(self) -> WantedResidency:
        rng, wants = self.rng, list[WantedAdapter]()
        for case in rng.sample(self.cases, rng.randint(0, 6)):
            assert case.adapter is not None
            kept = rng.choice([None, None, None, "host", "device"])
            tier = "device" if kept == "device" else rng.choice(["host", "device"])
            pinned = kept is not None or rng.random() < 0.2
            wants.append(WantedAdapter(case.adapter, tier, rng.random(), pinned, kept))  # type: ignore[arg-type]
        limits = {c.adapter.digest: rng.choice([0.001, 0.05]) for c in rng.sample(self.cases, 2) if c.adapter}
        return WantedResidency(wants, rng.choice([0.01, 1.0, 60.0]), limits)


@pytest.fixture(scope="module")
def kept(
    stories_dir: Path, load_stories: LoadModel, soon_again: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    root = tmp_path_factory.mktemp("everything")
    engine = LocalEngine(
        stories_dir, root / "registry", load=load_stories, prefix_cache="auto", dtype="float32", threads=1,
        kv_memory=32 << 20, cpu_workers=1, adapter_memory=1 << 20, host_memory=2 << 20, max_rows=8, block_tokens=4,
        chunk_tokens=24, prefetch_waste=1.0, store_link=LinkConfig(4e7),
        disk_cache=DiskCacheConfig(str(root / "cache"), 1 << 20),
    )  # fmt: skip
    with closing(engine):
        yield engine


@pytest.fixture
def engine(kept: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    with as_started(kept, monkeypatch):
        yield kept


@pytest.mark.parametrize("seed", range(3))
def test_all_at_once(
    engine: LocalEngine,
    reference: PeftReference,
    drawn_adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.setattr(prefetcher, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(engine.engine.cold, "cold_start", engine.engine.cold_start)  # what is forced ends with the test
    rng, tally = random.Random(seed), Tally()
    force(engine.engine, random.Random(seed + 100), faults=0.02)
    engine.engine.store.loader.device_link = DrawnLink(random.Random(seed + 200))  # type: ignore[assignment]
    cases = [Case(path, engine.deploy(path), [], 0) for path in drawn_adapters]
    chaos, running = Chaos(engine, cases, rng), list[tuple[Case, str]]()
    for _ in range(CALLS):
        kind = rng.choice([*cases, Case(None, None, [], 0)])
        prompt = [1, *(rng.randrange(3, 512) for _ in range(rng.randrange(60)))]
        case = Case(kind.directory, kind.adapter, prompt, rng.randint(1, 20))
        request = engine.submit(case.prompt, case.max_tokens, case.adapter, slo_class=rng.choice(CLASSES))
        running.append((case, request))
        if rng.random() < 0.15:
            engine.engine.cancel(running.pop(rng.randrange(len(running)))[1])
        for _ in range(rng.randrange(6)):
            chaos.act()
            engine.step()
            assert check_memory(engine.engine.store) == []
    engine.run()
    wrong = [problem for case, request in running for problem in check_one(engine, reference, case, request, tally)]
    assert not wrong, "\n".join(wrong)
    assert_empty(engine)


def check_one(engine: LocalEngine, reference: PeftReference, case: Case, request: str, tally: Tally) -> list[str]:
    finished = engine.outcomes[request].finished
    if finished is None or finished.reason not in ("stop", "length"):
        return [f"{request}: {finished}"]
    return check(engine, reference, case, engine.outcomes[request].tokens, tally)


def assert_empty(engine: LocalEngine) -> None:
    """Once nobody wants anything, each page of both tiers can be had, and no worker's hold is left."""
    inner, store = engine.engine, engine.engine.store
    inner.prefetcher.clear()
    deadline = time.monotonic() + 60
    while inner.orders._underway or store.hosts._fetching or store.hosts._measuring or store.loads._entries:
        engine.step()
        assert time.monotonic() < deadline
    for _ in range(20):
        engine.step()
    assert (list(store.hosts._waiters.all()), store.leases, inner.prefetcher.underway) == ([], 0, 0)
    for digest in list(store.device):
        assert store.discard(digest)
    for host in list(store.hosts.all()):
        store.hosts.forget(host)
    while store.hosts.used:  # a worker that was stopped may still have rows
        engine.step()
        assert time.monotonic() < deadline
    assert check_memory(store) == []
    assert store.pool.free_bytes == store.pool.size
