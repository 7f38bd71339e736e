"""What operators may ask of a node's engine: where each adapter is, layer by layer; prefetches; evictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from adapters.artifact import read_header
from cluster.messages import Adapter
from cluster.residency import AdapterState
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.layout import lay_out
from node_agent.adapter_memory.residency import adapter_states
from node_agent.config import DiskCacheConfig
from node_agent.engine import orders
from node_agent.ipc import Answer, Evict, ListAdapters, Prefetch
from tests.node_agent.adapter_world import Turnstile, loaded_lease
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, make_adapter

STORY = [1, 403, 407, 261]
PutTurnstile = Callable[[LocalEngine], Turnstile]


@pytest.fixture
def by_size(drawn_adapters: list[Path]) -> list[Path]:
    return sorted(drawn_adapters, key=lambda path: (path / "adapter_model.safetensors").stat().st_size)


@pytest.fixture
def turnstile_of() -> Iterator[PutTurnstile]:
    """Puts one before an engine's store; at the end of the test nothing waits at it any more."""
    made: list[Turnstile] = []

    def make(engine: LocalEngine) -> Turnstile:
        loader = engine.engine.store.loader
        made.append(Turnstile(loader.store))
        loader.store = made[-1]  # type: ignore[assignment]
        return made[-1]

    yield make
    for turnstile in made:
        turnstile.open_all()


def state_of(engine: LocalEngine, digest: str) -> AdapterState | None:
    found = engine.ask(ListAdapters("list")).found
    assert found is not None and found.unnamed == 0
    same = [state for state in found.adapters if state.digest == digest]
    assert len(same) <= 1
    return same[0] if same else None


def run_with(engine: LocalEngine, adapter: Adapter, count: int = 2) -> str:
    """The state that the call found the adapter in."""
    request = engine.submit(STORY, count, adapter, ignore_eos=True)
    engine.run()
    finished = engine.outcomes[request].finished
    assert finished is not None and finished.reason == "length"
    return finished.cold_start.state


@pytest.mark.usefixtures("by_layer")
def test_a_load_is_shown_layer_by_layer(
    make_engine: MakeEngine, turnstile_of: PutTurnstile, stories_dir: Path, tmp_path: Path
) -> None:
    whole = make_adapter(stories_dir, tmp_path / "whole", 3, r=7, lora_alpha=7, target_modules=ALL_TARGETS)
    engine = make_engine(cold_start="wait")
    adapter, layers = engine.deploy(whole), engine.base.num_layers
    turnstile = turnstile_of(engine)
    assert state_of(engine, adapter.digest) is None
    request = engine.submit(STORY, 1, adapter)
    engine.run(until=lambda: request in engine.engine.running)
    let: list[int] = []
    for done in range(layers):
        state = state_of(engine, adapter.digest)
        assert state is not None
        assert (state.tier, state.in_use, state.layers.count("device")) == ("absent", 1, done)
        assert state.layers.count("no") == layers - done
        turnstile.await_waiting(min(3, layers - done))
        let.append(min(set(turnstile.waiting) - set(let)))
        turnstile.let(let[-1])
        engine.run(until=lambda: _arrived(engine, adapter.digest) > done or request not in engine.engine.running)  # noqa: B023
    engine.run()
    state = state_of(engine, adapter.digest)
    assert state is not None
    assert (state.tier, state.in_use, state.waiting, state.layers) == ("device", 0, 0, [])
    assert (state.ranks, state.bytes > 0) == ([7], True)


def _arrived(engine: LocalEngine, digest: str) -> int:
    (state,) = [state for state in adapter_states(engine.engine.store).adapters if state.digest == digest]
    return state.layers.count("device")


def test_a_prefetched_adapter_is_warm_for_its_first_call(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine()
    adapter = engine.deploy(by_size[-1])
    assert engine.ask(Prefetch("p", adapter)) == Answer("p", tier="device")
    engine.assert_clean()
    state = state_of(engine, adapter.digest)
    assert state is not None and (state.in_use, state.waiting) == (0, 0)
    assert run_with(engine, adapter) == "none"
    assert engine.ask(Prefetch("again", adapter)) == Answer("again", tier="device")


def test_a_prefetch_takes_no_room_from_adapters_in_use(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """It goes as far as host memory; an idle adapter, on the other hand, makes room."""
    engine = make_engine(adapter_slots=1)
    used, wanted = (engine.deploy(path) for path in by_size[:2])
    request = engine.submit(STORY, 300, used, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[request].tokens) > 1)
    assert engine.ask(Prefetch("p", wanted)) == Answer("p", tier="host")
    assert request in engine.engine.running
    engine.engine.cancel(request)
    assert engine.ask(Prefetch("q", wanted)) == Answer("q", tier="device")
    state = state_of(engine, used.digest)
    assert state is not None and state.tier == "host"


def test_a_prefetch_does_not_go_before_requests(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """While a request waits for room, a prefetch takes none."""
    engine = make_engine(adapter_slots=1)
    used, waiting, wanted = (engine.deploy(path) for path in by_size[:3])
    first = engine.submit(STORY, 60, used, ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[first].tokens))
    second = engine.submit(STORY, 60, waiting, ignore_eos=True)
    engine.engine.orders.take(Prefetch("p", wanted))
    engine.run(until=lambda: bool(engine.outcomes[second].tokens))
    assert state_of(engine, wanted.digest) is not None
    assert run_with(engine, wanted) == "host"
    engine.run(until=lambda: "p" in engine.answers)
    assert engine.answers.pop("p").error_type == ""


def test_one_tenant_has_only_some_of_the_places(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine()
    adapter = engine.deploy(by_size[0])
    others = [replace(adapter, digest=f"{number:064}") for number in range(orders.MAX_PREFETCHES + 2)]
    own = orders.MAX_TENANT_PREFETCHES
    took = engine.engine.orders
    for number, each in enumerate(others[: own + 1]):
        took.take(Prefetch(str(number), each, "a"))
    assert [(each.id, each.error_type) for each in took.answers()] == [(str(own), "overloaded")]
    for number, each in enumerate(others[own + 1 :]):
        took.take(Prefetch(str(number), each))
    assert [(each.id, each.error_type) for each in took.answers()] == [(str(orders.MAX_PREFETCHES - own), "overloaded")]


def test_a_prefetch_that_steps_back_holds_no_host_memory(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """Its adapter lies there whole when a request comes whose own has no room beside it: each would wait for the
    other."""
    engine = make_engine()
    fetched, wanted = (engine.deploy(path) for path in by_size[-2:])
    store = engine.engine.store
    engine.engine.orders.take(Prefetch("p", fetched))
    host = store.hosts.load(fetched)
    while not host.complete:
        store.poll()
        time.sleep(0.001)
    store.hosts.memory = engine_bytes(engine, wanted)
    request = engine.submit(STORY, 2, wanted, ignore_eos=True)
    engine.run(limit=20)
    finished = engine.outcomes[request].finished
    assert finished is not None and finished.reason == "length"
    while "p" not in engine.answers:
        engine.step()
    assert engine.answers["p"].tier in ("device", "host")
    assert not store.hosts.waiting(fetched.digest)
    assert check_memory(store) == []


def test_a_prefetched_adapter_that_a_request_brought_meanwhile(make_engine: MakeEngine, by_size: list[Path]) -> None:
    """Others' requests wait all the time: there is nothing to place any more."""
    engine = make_engine()
    adapter, store, orders_ = engine.deploy(by_size[0]), engine.engine.store, engine.engine.orders
    orders_.take(Prefetch("p", adapter))
    held = loaded_lease(store, adapter)
    orders_.poll(may_place=False)
    assert orders_.answers() == [Answer("p", tier="device")]
    store.release(held, [])
    assert not store.hosts.waiting(adapter.digest)


def engine_bytes(engine: LocalEngine, adapter: Adapter) -> int:
    """Of host memory that the adapter takes."""
    store = engine.engine.store
    header = read_header(engine.registry.store, adapter.artifact)
    return lay_out(header, engine.base, store.pool.data.element_size(), store.pool.page_units).size


def test_what_can_not_be_prefetched_is_told(make_engine: MakeEngine, by_size: list[Path]) -> None:
    engine = make_engine(adapter_memory=64 << 10)
    too_large = engine.ask(Prefetch("p", engine.deploy(by_size[-1])))
    assert (too_large.error_type, too_large.tier) == ("too_large", "absent")
    gone = Adapter("0" * 64, "artifacts/v1/none/none", 1, (1,))
    missing = engine.ask(Prefetch("q", gone))
    assert (missing.error_type, missing.tier) == ("unavailable", "absent")
    assert "artifacts" not in missing.error, "nothing of the store's inside is shown"
    engine.engine.store.hosts.failure_memory = 0
    engine.step()
    assert engine.ask(ListAdapters("list")).found.adapters == []  # type: ignore[union-attr]


def test_prefetches_are_bounded_in_number_and_time(
    make_engine: MakeEngine, turnstile_of: PutTurnstile, by_size: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "MAX_PREFETCHES", 1)
    engine = make_engine()
    first, second = (engine.deploy(path) for path in by_size[:2])
    turnstile = turnstile_of(engine)
    monkeypatch.setattr(orders, "MAX_PREFETCH_S", 0.5)
    engine.engine.orders.take(Prefetch("p", first))
    assert engine.ask(Prefetch("q", second)).error_type == "overloaded"
    while "p" not in engine.answers:
        engine.step()
    assert engine.answers.pop("p").error_type == "timeout"
    engine.assert_clean()
    turnstile.open_all()
    monkeypatch.setattr(orders, "MAX_PREFETCH_S", 60)
    assert engine.ask(Prefetch("p", second)).tier == "device"


def test_an_evicted_adapter_is_nowhere_on_the_node(
    make_engine: MakeEngine, by_size: list[Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    engine = make_engine(disk_cache=DiskCacheConfig(str(cache), 1 << 30))
    adapter = engine.deploy(by_size[-1])
    run_with(engine, adapter)
    while not engine.engine.store.cache.has(adapter.digest):  # type: ignore[union-attr]
        engine.step()
    while (answer := engine.ask(Evict("e", adapter.digest))).error_type:
        assert answer.error.endswith("it is being loaded"), "the thread that wrote the file has not come back yet"
    assert answer == Answer("e", tier="absent")
    assert list(cache.iterdir()) == []
    assert state_of(engine, adapter.digest) is None
    assert engine.engine.store.hosts.used == 0
    assert check_memory(engine.engine.store) == []
    assert engine.ask(Evict("e", adapter.digest)).error_type == "not_found"
    assert run_with(engine, adapter) == "absent"


def test_an_adapter_in_use_is_not_evicted(
    make_engine: MakeEngine, turnstile_of: PutTurnstile, by_size: list[Path]
) -> None:
    """Neither while a request waits for it, nor while it loads, nor while requests are computed with it."""
    engine = make_engine(max_rows=1)
    adapter = engine.deploy(by_size[-1])
    turnstile = turnstile_of(engine)

    def refused() -> str:
        answer = engine.ask(Evict("e", adapter.digest))
        assert answer.error_type == "conflict"
        return answer.error

    busy = engine.submit(STORY, 450, ignore_eos=True)
    engine.run(until=lambda: busy in engine.engine.running)
    request = engine.submit(STORY, 8, adapter, ignore_eos=True)
    assert "1 requests wait" in refused()
    engine.engine.cancel(busy)
    engine.run(until=lambda: request in engine.engine.running)
    assert "1 requests use it" in refused()
    turnstile.open_all()
    engine.run(until=lambda: len(engine.outcomes[request].tokens) > 1)
    assert "1 requests use it" in refused()
    engine.run()
    assert len(engine.outcomes[request].tokens) == 8
    assert engine.ask(Evict("e", adapter.digest)).tier == "absent"
