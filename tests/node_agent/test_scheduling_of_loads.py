"""Loads, rows and memory are shared: no slow, broken, large or popular adapter keeps the others out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapters.store import Arrived
from cluster.messages import Adapter
from node_agent.adapter_memory.fetch import TRIES
from node_agent.coldstart.cold_starts import ColdStartMode
from node_agent.engine import admission
from node_agent.engine.batch import build_lora
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.ipc import Finished
from node_agent.leases import Lease
from tests.node_agent.adapter_world import comes_with_header, header_only
from tests.support.local_engine import LocalEngine, MakeEngine

STORY = [1, 403, 407, 261]


class Valve:
    """Holds the ranged reads of chosen objects until it is opened, and can make them fail; counts them all."""

    def __init__(self, engine: LocalEngine) -> None:
        self._inner = engine.engine.store.loader.store
        engine.engine.store.loader.store = self  # type: ignore[assignment]
        self._held: dict[str, threading.Event] = {}
        self.broken: set[str] = set()
        self.reads = 0

    def hold(self, *adapters: Adapter) -> None:
        self._held |= {adapter.artifact: threading.Event() for adapter in adapters}

    def open(self) -> None:
        for event in self._held.values():
            event.set()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        found = self._inner.get_range(key, start, length)
        return found if start else header_only(found)

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        if comes_with_header(start):
            return self._inner.get_range_into(key, start, buffer, arrived)
        self.reads += 1
        if key in self._held:
            assert self._held[key].wait(60)
        if key in self.broken:
            raise OSError("the disk is gone")
        return self._inner.get_range_into(key, start, buffer)


def ended(engine: LocalEngine, request: str) -> Finished:
    finished = engine.outcomes[request].finished
    assert finished is not None
    return finished


def step_until(engine: LocalEngine, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        engine.step()
        assert time.monotonic() < deadline


@pytest.fixture
def by_size(drawn_adapters: list[Path]) -> list[Path]:
    return sorted(drawn_adapters, key=lambda path: (path / "adapter_model.safetensors").stat().st_size)


def test_calls_of_a_slow_adapter_leave_rows_for_others(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine(max_rows=4)
    slow, warm = engine.deploy(by_size[-1]), engine.deploy(by_size[0])
    engine.submit(STORY, 1, warm)
    engine.run()
    valve = Valve(engine)
    valve.hold(slow)
    waiting = [engine.submit(STORY, 3, slow) for _ in range(6)]
    step_until(engine, lambda: bool(engine.engine.running))
    quick = [engine.submit(STORY, 3), engine.submit(STORY, 3, warm)]
    step_until(engine, lambda: all(engine.outcomes[r].finished for r in quick))
    assert not any(engine.outcomes[r].finished for r in waiting)
    valve.open()
    engine.run()
    assert all(ended(engine, r).reason in ("length", "stop") for r in waiting)


def test_calls_of_a_slow_adapter_leave_kv_blocks_for_others(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine(max_rows=32, block_tokens=4, kv_memory=2 * 5 * 4 * 8 * 4 * 4 * 41)  # 40 blocks
    slow = engine.deploy(by_size[-1])
    valve = Valve(engine)
    valve.hold(slow)
    waiting = [engine.submit(STORY, 44, slow) for _ in range(4)]  # 12 blocks each: one may wait with its blocks
    step_until(engine, lambda: bool(engine.engine.running))
    quick = engine.submit(STORY, 60)  # 16 blocks
    step_until(engine, lambda: engine.outcomes[quick].finished is not None)
    assert not any(engine.outcomes[r].finished for r in waiting)
    valve.open()
    engine.run()


def test_slow_stores_hold_up_no_copy(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """More fetches hang than there are copy workers; an adapter in host memory comes to the device all the same."""
    engine = make_engine(adapter_slots=4)
    hosted, *slow = [engine.deploy(path) for path in by_size[:4]]
    engine.submit(STORY, 1, hosted)
    engine.run()
    engine.engine.store.room.evict(hosted.digest)  # it stays in host memory
    valve = Valve(engine)
    valve.hold(*slow)
    waiting = [engine.submit(STORY, 1, adapter) for adapter in slow]
    step_until(engine, lambda: len(engine.engine.running) > 2)
    quick = engine.submit(STORY, 2, hosted)
    step_until(engine, lambda: engine.outcomes[quick].finished is not None)
    assert ended(engine, quick).cold_start.state == "host"
    valve.open()
    engine.run()
    assert all(ended(engine, r).reason in ("length", "stop") for r in waiting)


def test_steady_use_starves_nobody(
    make_engine: MakeEngine, by_size: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot, and its adapter is called over and over: another adapter's call still gets its turn."""
    monkeypatch.setattr(admission, "STARVED_AFTER", 0.05)
    engine = make_engine(adapter_slots=1)
    popular, other = engine.deploy(by_size[0]), engine.deploy(by_size[1])
    engine.submit(STORY, 8, popular, ignore_eos=True)
    step_until(engine, lambda: bool(engine.engine.running))
    starving = engine.submit(STORY, 2, other)

    def keep_calling() -> bool:
        if sum(r.adapter is popular for r in [*engine.engine.running.values(), *engine.engine.queue]) < 2:
            engine.submit(STORY, 8, popular, ignore_eos=True)
        return engine.outcomes[starving].finished is not None

    step_until(engine, keep_calling)
    assert ended(engine, starving).reason in ("length", "stop")
    engine.run()


def test_small_adapters_do_not_pass_a_large_one_that_waits_for_room(
    make_engine: MakeEngine, by_size: list[Path]
) -> None:
    engine = make_engine(adapter_slots=3)
    held, large, small = (engine.deploy(by_size[i]) for i in (0, -1, 1))
    store = engine.engine.store
    for adapter in (held, large, small):
        engine.submit(STORY, 1, adapter)
        engine.run()
    for adapter in (large, small):
        store.room.evict(adapter.digest)  # both stay in host memory
    small_pages = -(-(128 << 10) // store.pool.page_size)
    taken = store.pool.pages.take(store.pool.pages.free - small_pages, "test")  # the large one does not fit beside it
    assert taken is not None
    running = engine.submit(STORY, 40, held, ignore_eos=True)
    engine.run(until=lambda: bool(engine.engine.running))
    first, second = engine.submit(STORY, 1, large), engine.submit(STORY, 1, small)
    step_until(engine, lambda: len(engine.outcomes[running].tokens) > 20)
    assert not engine.outcomes[first].admitted
    assert not engine.outcomes[second].admitted
    store.pool.pages.give(taken, "test")
    engine.run()
    assert all(ended(engine, r).reason in ("length", "stop") for r in (first, second))


def test_a_long_request_is_not_passed_by_short_ones(make_engine: MakeEngine) -> None:
    """First come, first served for KV blocks, or a stream of short requests would keep a long one out."""
    engine = make_engine(block_tokens=4, kv_memory=2 * 5 * 4 * 8 * 4 * 4 * 21)  # 20 blocks
    running = engine.submit(STORY, 40, ignore_eos=True)  # 11
    engine.run(until=lambda: bool(engine.engine.running))
    long, short = engine.submit(STORY, 60, ignore_eos=True), engine.submit(STORY, 4)
    step_until(engine, lambda: engine.outcomes[running].finished is not None)
    assert not engine.outcomes[short].admitted
    engine.run()
    assert len(engine.outcomes[long].tokens) == 60


def test_at_most_max_cold_passes_are_open(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine(max_cold=2, max_rows=32)
    engine.engine.cold_start.mode = ColdStartMode(("pipeline",))
    adapters = [engine.deploy(path) for path in by_size[:5]]
    valve = Valve(engine)
    valve.hold(*adapters)
    for adapter in adapters:
        engine.submit(STORY, 1, adapter)
    step_until(engine, lambda: len(engine.engine.running) == 5)
    for _ in range(5):
        engine.step()
        assert len(engine.engine.cold.open) == 2
    valve.open()
    engine.run()


def test_all_who_wait_for_a_broken_adapter_fail_together(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """One failed read answers all of them; what was read of it is freed, and others load."""
    engine = make_engine(max_rows=1, host_memory=1 << 20)
    engine.engine.store.hosts.failure_memory = 600.0  # nobody comes so late that the load is tried anew
    broken, healthy = engine.deploy(by_size[-1]), engine.deploy(by_size[0])
    valve = Valve(engine)
    valve.broken.add(broken.artifact)
    writing = engine.submit(STORY, 400, ignore_eos=True)  # longer than all tries
    engine.run(until=lambda: bool(engine.engine.running))
    requests = [engine.submit(STORY, 2, broken) for _ in range(8)]
    step_until(engine, lambda: valve.reads > 0 and not engine.engine.store.hosts._fetching)
    step_until(engine, lambda: engine.engine.store.hosts.used == 0)
    engine.run()
    assert [ended(engine, r).error_type for r in requests] == ["unavailable"] * 8
    assert valve.reads == TRIES  # one load for all
    assert len(engine.outcomes[writing].tokens) == 400
    engine.submit(STORY, 2, healthy)
    engine.run()


def test_a_load_that_nobody_waits_for_is_dropped(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine(max_rows=1)
    adapters = [engine.deploy(path) for path in by_size[-3:]]
    writing = engine.submit(STORY, 100, ignore_eos=True)
    engine.run(until=lambda: bool(engine.engine.running))
    valve = Valve(engine)
    valve.hold(*adapters)
    requests = [engine.submit(STORY, 2, adapter) for adapter in adapters]
    step_until(engine, lambda: valve.reads == 3)
    for request in requests:
        engine.engine.cancel(request)
    valve.open()
    step_until(engine, lambda: not engine.engine.store.hosts._all)
    assert valve.reads == 3  # one range each
    again = engine.submit(STORY, 2, adapters[0])
    engine.engine.cancel(writing)
    engine.run()
    assert ended(engine, again).reason in ("length", "stop")


def test_host_memory_is_bounded_and_used_last_stays(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine(adapter_slots=1, eviction="lru")
    paths = by_size[4:8]
    adapters = [engine.deploy(path) for path in paths]
    hosts = engine.engine.store.hosts
    sizes = []
    for adapter in adapters[:3]:
        engine.submit(STORY, 1, adapter)
        engine.run()
        host = hosts.get(adapter.digest)
        assert host is not None
        sizes.append(host.size)
    assert hosts.used == sum(sizes)
    hosts.memory = sum(sizes)
    engine.submit(STORY, 1, adapters[0])  # the first is the youngest now, the second the oldest
    engine.run()
    engine.submit(STORY, 1, adapters[3])
    engine.run()
    assert hosts.used <= hosts.memory
    assert hosts.get(adapters[1].digest) is None
    assert hosts.get(adapters[0].digest) is not None
    assert hosts.get(adapters[3].digest) is not None


def test_nothing_is_evicted_in_vain(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """Neither tier throws adapters out when that does not make enough room."""
    engine = make_engine()
    store = engine.engine.store
    small = [engine.deploy(path) for path in by_size[:2]]
    for adapter in small:
        engine.submit(STORY, 2, adapter, ignore_eos=True)
        engine.run()
        step_until(engine, lambda digest=adapter.digest: store.ready(digest))  # type: ignore[misc]
    assert store.room._victims(store.pool.pages.count + 1) is None
    assert store.hosts._make_room(store.hosts.memory + 1, 1) is None
    assert all(store.ready(adapter.digest) and store.hosts.get(adapter.digest) for adapter in small)


def test_cold_start_figures_are_what_happened(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """All who waited say so, also those for whom no pass was open; later calls say none."""
    engine = make_engine(max_cold=1, max_rows=16, cold_start="wait")
    adapter = engine.deploy(by_size[-1])
    valve = Valve(engine)
    valve.hold(adapter)
    requests = [engine.submit(STORY, 2, adapter) for _ in range(3)]
    step_until(engine, lambda: len(engine.engine.running) == 3)
    valve.open()
    engine.run()
    for request in requests:
        cold = ended(engine, request).cold_start
        assert (cold.state, cold.plan) == ("absent", "wait")
        assert cold.load > 0
        assert cold.exposed > 0
    engine.engine.store.room.evict(adapter.digest)
    hosted = engine.submit(STORY, 2, adapter)
    engine.run()
    assert (ended(engine, hosted).cold_start.state, ended(engine, hosted).cold_start.plan) == ("host", "wait")
    warm = engine.submit(STORY, 2, adapter)
    engine.run()
    assert ended(engine, warm).cold_start == type(cold)("none", "none", 0.0, 0.0)


def test_neighbouring_rows_of_one_adapter_are_one_segment() -> None:
    def row(slot: int, length: int) -> Row:
        request = Request("r", "t", [1] * length, 1, None, 0.0, None, False)  # type: ignore[arg-type]
        request.lease = None if slot < 0 else Lease(f"d{slot}", slot, (4,))
        return Row(request, length)

    batch = build_lora([row(-1, 2), row(-1, 1), row(3, 1), row(3, 4), row(5, 2)], torch.device("cpu"))
    assert batch.bounds == [(0, 3), (3, 8), (8, 10)]
    assert batch.seg_slot.tolist() == [-1, 3, 5]
    assert batch.seg_start.tolist() == [0, 3, 8, 10]
    assert batch.token_slot.tolist() == [-1] * 3 + [3] * 5 + [5] * 2
    assert (batch.max_rank, batch.empty) == (4, False)
    assert build_lora([row(-1, 2)], torch.device("cpu")).empty
