"""States of adapters and requests: the tables are what real stores and engines do, and all else is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from adapters.blobs import blob_key
from cluster.messages import Adapter
from node_agent.adapter_memory import loads
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import CopyStates, HostAdapter
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import LinkConfig
from node_agent.engine import request as request_module
from node_agent.engine.request import Request
from node_agent.leases import LayerState
from node_agent.states import (
    DEVICE_TRANSITIONS,
    FOLDER_TRANSITIONS,
    HOST_TRANSITIONS,
    REQUEST_TRANSITIONS,
    DeviceState,
    FolderState,
    HostState,
    IllegalTransition,
    RequestState,
    Thread,
)
from node_agent.types import Plan
from node_agent.vllm import folder as folder_module
from node_agent.vllm.folder import Folder
from tests.node_agent.adapter_world import Turnstile, World, lease, loaded_lease, starts, until
from tests.node_agent.test_engine import STORY, Gate
from tests.node_agent.vllm.folder_world import BYTES, FolderWorld, put_adapter
from tests.support.local_engine import LocalEngine, MakeEngine

ROOT = Path(__file__).parents[2]

Transitions = dict[tuple[Enum, Enum], Thread]


class Recorder:
    """Transitions that were made, by the threads that made them."""

    def __init__(self) -> None:
        self.made: Transitions = {}

    def watch(self, module: Any, patch: pytest.MonkeyPatch) -> None:
        check, engine = module.check_transition, threading.current_thread()

        def record(before: Enum, after: Enum, legal: Any) -> None:
            thread = Thread.ENGINE if threading.current_thread() is engine else Thread.LOADER
            self.made[before, after] = self.made.get((before, after), Thread(0)) | thread
            check(before, after, legal)

        patch.setattr(module, "check_transition", record)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    recorder.watch(loads, monkeypatch)
    recorder.watch(request_module, monkeypatch)
    recorder.watch(folder_module, monkeypatch)
    return recorder


def host_of(state: HostState) -> HostAdapter:
    return HostAdapter("digest", "artifact", state)


def copy_of(state: DeviceState) -> CopyStates:
    return CopyStates.of(1, state=state)


def folder_in(state: FolderState) -> Folder:
    return Folder(Adapter("digest", "", 1, (1,)), Path("folder"), state)


def request_in(state: RequestState) -> Request:
    request = Request("r", "t", [1], 1, None, 0.0, None, False)  # type: ignore[arg-type]
    request.state = state
    return request


TABLES: list[tuple[type[Enum], Any, Callable[[Any], Any], str]] = [
    (HostState, HOST_TRANSITIONS, host_of, "adapter-memory.md"),
    (DeviceState, DEVICE_TRANSITIONS, copy_of, "adapter-memory.md"),
    (FolderState, FOLDER_TRANSITIONS, folder_in, "adapter-memory.md"),
    (RequestState, REQUEST_TRANSITIONS, request_in, "seams.md"),
]


@pytest.mark.parametrize(("states", "table", "make", "_page"), TABLES)
def test_what_the_table_does_not_have_is_refused(
    states: type[Enum], table: Any, make: Callable[[Any], Any], _page: str
) -> None:
    for before, after in product(states, states):
        record = make(before)
        if (before, after) in table:
            record.change_state(after)
            assert record.state is after
            continue
        with pytest.raises(IllegalTransition, match=f"{states.__name__}: {after.value} does not follow"):
            record.change_state(after)
        assert record.state is before


@pytest.mark.parametrize(("states", "table", "_make", "page"), TABLES)
def test_the_page_has_the_table(states: type[Enum], table: Any, _make: object, page: str) -> None:
    text = (ROOT / "docs" / "design" / page).read_text()
    part = text.split(f"<!-- {states.__name__} -->")[1]
    rows = [line.split("|")[1:4] for line in part.splitlines() if line.startswith("| ")][1:]
    names = {Thread.ENGINE: "engine", Thread.LOADER: "loader", Thread.ENGINE | Thread.LOADER: "loader, engine"}
    assert [[cell.strip() for cell in row] for row in rows] == [
        [before.value, after.value, names[thread]] for (before, after), thread in table.items()
    ]


# --- adapters


@pytest.fixture
def make_stiled(world: World) -> Iterator[Callable[..., tuple[AdapterStore, Turnstile]]]:
    """Stores whose reads wait for a turnstile."""
    stores: list[tuple[AdapterStore, Turnstile]] = []

    def make(**settings: object) -> tuple[AdapterStore, Turnstile]:
        turnstile = Turnstile(world.objects)
        stores.append((world.store(turnstile, **settings), turnstile))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store, turnstile in stores:
        turnstile.open_all()
        store.close()


def fail_read(start: int, buffer: memoryview) -> int:
    raise ValueError("no answer at all")


def reclaim(store: AdapterStore, turnstile: Turnstile, world: World, *, held: bool) -> HostAdapter:
    """Returns a predicted prefetch that is under way, and whose room a request needs. CPU workers read it if `held`."""
    predicted, urgent = full_adapters(world)
    store.announce(predicted, Priority.PREDICTED)
    until(store, lambda: len(turnstile.waiting) == 1)
    host = store.hosts.get(predicted.digest)
    assert host is not None
    if held:
        assert store.hosts.hold(host)
    store.announce(urgent)
    until(store, lambda: host.state is HostState.RECLAIMED)
    store.retract(urgent.digest)
    store.retract(predicted.digest, Priority.PREDICTED)
    return host


def full_adapters(world: World) -> tuple[Adapter, Adapter]:
    """Returns the two largest adapters."""
    first, second = sorted(world.adapters, key=lambda adapter: adapter.bytes)[-2:]
    return first, second


def layout_of(world: World, adapter: Adapter) -> AdapterLayout:
    store = world.store()
    held = lease(store, adapter)
    layout = store.layout(held)
    until(store, lambda: store.loaded(held))
    store.release(held, [])
    store.close()
    return layout


@pytest.mark.usefixtures("by_layer")
def test_stores_make_every_transition_of_adapters_and_no_other(
    make_stiled: Callable[..., tuple[AdapterStore, Turnstile]], world: World, adapter: Adapter, recorder: Recorder
) -> None:
    # a load to its end, an artifact that is not there, and a read that fails
    store, turnstile = make_stiled()
    turnstile.open_all()
    store.release(loaded_lease(store, adapter), [])
    store.announce(Adapter("0" * 64, "nowhere", 1, (1,)))
    missing = store.hosts.get("0" * 64)
    until(store, lambda: missing is not None and missing.state is HostState.FAILED)
    store.retract("0" * 64)
    store, turnstile = make_stiled()
    turnstile.spoil = fail_read
    held = lease(store, adapter)
    turnstile.open_all()
    until(store, lambda: store.device[held.digest].settled)
    assert store.device[held.digest].copy.state is DeviceState.FAILED
    store.release(held, [])

    # a caller that leaves while its adapter is copied; and one that nobody wants from the start
    store, turnstile = make_stiled()
    held, offsets = lease(store, adapter), starts(world, adapter)
    turnstile.await_waiting(1)
    turnstile.let(offsets[0])
    until(store, lambda: store.state(held, 0) == LayerState.DEVICE)
    entry = store.device[held.digest]
    store.release(held, [])
    until(store, lambda: not store.device)
    turnstile.open_all()
    until(store, lambda: entry.host.state is HostState.ABANDONED)
    assert entry.copy.state is DeviceState.ABANDONED
    unwanted = store.hosts.load(world.adapters[0] if adapter != world.adapters[0] else world.adapters[1])
    until(store, lambda: unwanted.state is HostState.ABANDONED)

    # a prefetch whose room a request needs: given up, ended for CPU workers, failed
    size = max(layout_of(world, each).size for each in full_adapters(world))
    for held_host, spoils in ((False, False), (True, False), (True, True)):
        store, turnstile = make_stiled(host_memory=size)
        host = reclaim(store, turnstile, world, held=held_host)
        if spoils:
            turnstile.spoil = fail_read
        turnstile.open_all()
        until(store, lambda: host.complete or host.failed)  # noqa: B023
        if held_host:
            store.release_host(host)
        until(store, lambda: host.pages is None)  # noqa: B023

    table: dict[Any, Thread] = {**HOST_TRANSITIONS, **DEVICE_TRANSITIONS}
    assert recorder.made.keys() == table.keys()
    assert all(thread in table[transition] for transition, thread in recorder.made.items())


def test_folders_make_every_transition_and_no_other(tmp_path: Path, recorder: Recorder) -> None:
    # a load to its end, a file that is not there, and one that is not what its name says
    world = FolderWorld(tmp_path / "free", memory=int(1.5 * BYTES))
    with closing(world.tier):
        adapters = [put_adapter(world.objects, at) for at in range(4)]
        first = world.loaded(adapters[0])
        world.objects.delete(blob_key(adapters[1].config))
        world.objects.put(blob_key(adapters[2].weights), b"other")
        for adapter in adapters[1:3]:
            folder = world.tier.load(adapter)
            world.until(lambda: folder.failed)  # noqa: B023

        # one that nobody wants any more: before its files were measured, and while there is no room
        with world.tier.threads.changed:
            unwanted = world.tier.load(adapters[3])
            world.tier.drop(unwanted.digest)
        first.holds += 1
        waiting = world.tier.load(adapters[3])
        world.until(lambda: world.tier.lacks_room(waiting.digest))
        world.tier.drop(waiting.digest)
        assert unwanted.abandoned and waiting.abandoned
        first.holds -= 1

    # and while a thread reads it
    world = FolderWorld(tmp_path / "held", held=True)
    with closing(world.tier):
        folder = world.tier.load(put_adapter(world.objects, 1))
        world.until(world.held.reading.is_set)
        world.tier.drop(folder.digest)
        world.held.let.set()
        world.until(lambda: not world.files())

    assert recorder.made == FOLDER_TRANSITIONS


# --- requests


def state_of(engine: LocalEngine, request: str) -> RequestState | None:
    record = engine.engine.running.get(request) or engine.engine.queue.get(request)
    return record.state if record is not None else None


def in_state(engine: LocalEngine, request: str, state: RequestState) -> None:
    engine.run(until=lambda: state_of(engine, request) is state)
    assert state_of(engine, request) is state


def always_pipeline(engine: LocalEngine) -> None:
    engine.engine.cold_start.plan = lambda lease, n_tokens, ahead: Plan("pipeline")  # type: ignore[method-assign]


def test_engines_make_every_transition_of_requests_and_no_other(
    make_engine: MakeEngine, drawn_adapters: list[Path], recorder: Recorder
) -> None:
    # two that take turns for one row; cancelled in the queue, and cancelled after they gave their place away
    engine = make_engine(max_rows=1)
    for cancelled in (False, True):
        cheap = engine.submit(STORY, 20, ignore_eos=True, tenant="cheap", slo_class="best_effort")
        in_state(engine, cheap, RequestState.RUNNING)
        strict = engine.submit(STORY, 3, ignore_eos=True, tenant="dear", slo_class="strict", ttft=0.5)
        waits = engine.submit(STORY, 3, tenant="cheap")
        in_state(engine, cheap, RequestState.PREEMPTED)
        engine.engine.cancel(waits)
        if cancelled:
            engine.engine.cancel(cheap)
        engine.run()
        assert [len(engine.outcomes[strict].tokens), len(engine.outcomes[cheap].tokens) == 20] == [3, not cancelled]

    # waits for its adapter: to the end, cancelled, and giving its place away
    engine = make_engine(max_rows=1, cold_start="wait")
    adapter = engine.deploy(drawn_adapters[0])
    for ending in ("loads", "is cancelled", "is preempted"):
        gate = Gate(engine)
        waits = engine.submit(STORY, 2, adapter, tenant="cheap", slo_class="best_effort")
        in_state(engine, waits, RequestState.AWAITING_ADAPTER)
        if ending == "is cancelled":
            engine.engine.cancel(waits)
        elif ending == "is preempted":
            engine.submit(STORY, 3, ignore_eos=True, tenant="dear", slo_class="strict", ttft=0.5)
            in_state(engine, waits, RequestState.PREEMPTED)
        gate.open()
        engine.run()
        until(engine.engine.store, lambda: discarded(engine.engine.store, adapter))

    # a cold pass: to its end, cancelled, and of which nothing counts
    for ending in ("ends", "is cancelled", "counts for nothing"):
        engine = make_engine(cold_start="pipeline", cpu_workers=0, load_link=LinkConfig(1e6))
        always_pipeline(engine)
        cold = engine.submit(STORY, 2, engine.deploy(drawn_adapters[0]))
        in_state(engine, cold, RequestState.COLD_PREFILLING)
        if ending == "is cancelled":
            engine.engine.cancel(cold)
        elif ending == "counts for nothing":
            engine.engine.cold._compute = lambda cold, upto: False  # type: ignore[method-assign]
        engine.run()

    assert {transition for transition in recorder.made if isinstance(transition[0], RequestState)} == set(
        REQUEST_TRANSITIONS
    )
    assert all(recorder.made[transition] is Thread.ENGINE for transition in REQUEST_TRANSITIONS)


def discarded(store: AdapterStore, adapter: Adapter) -> bool:
    return adapter.digest not in store.device or store.discard(adapter.digest)
