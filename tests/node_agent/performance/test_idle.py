"""The measurement of an idle node: calls go before it, and it leaves the engine as it was."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.messages import GenerateRequest, Sampling
from node_agent import engine_loop
from node_agent.engine_channel import Channel, WakeUp
from node_agent.engine_loop import Loop
from node_agent.engine_process import ready_message
from node_agent.ipc import Finished, Generated, Stats, Submit, encode
from node_agent.performance import idle as idle_module
from node_agent.performance import idle_base
from node_agent.performance.idle import IdleMeasurement
from node_agent.types import Pass, PassLora, StepBatch
from tests.node_agent.test_engine_process import received
from tests.support.local_engine import LocalEngine, MakeEngine

CALL = Submit(GenerateRequest("call", "", "v0", [1, 70, 80], 2, Sampling(temperature=0), timeout=60.0, ignore_eos=True))


@contextmanager
def loop_of(engine: LocalEngine, idle: IdleMeasurement, folder: Path) -> Iterator[tuple[Loop, Channel, socket.socket]]:
    """The engine process's loop, with this test in place of the API process."""
    wake = WakeUp()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        channel = Channel(str(folder / "socket"))
        peer, _ = server.accept()
        loop = Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: False, idle)
        try:
            yield loop, channel, peer
        finally:
            loop.drop_all()
            channel.close()
            peer.close()
            wake.close()


class CountedPass:
    """A pass of the real runner that tells of each layer."""

    def __init__(self, run: Pass, layers: list[int]) -> None:
        self._run, self._layers = run, layers

    def __getattr__(self, name: str) -> object:
        return getattr(self._run, name)

    def advance(self, to_layer: int) -> None:
        self._run.advance(to_layer)
        self._layers.append(to_layer)


def test_a_call_waits_for_no_more_than_a_layer(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then finds all that the measurement had borrowed."""
    engine = make_engine()
    monkeypatch.setattr(engine_loop, "QUIET_S", 0.0)
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    held = (engine.engine.blocks.free, engine.engine.store.residents(), engine.engine.store.leases)
    layers, start, calls_at = list[int](), engine.engine.runner.start, [2]

    with loop_of(engine, idle, tmp_path) as (loop, channel, peer), selectors.DefaultSelector() as selector:
        selector.register(channel.socket, selectors.EVENT_READ)

        class Watched(CountedPass):
            def advance(self, to_layer: int) -> None:
                super().advance(to_layer)
                if len(layers) in calls_at and not engine.engine.busy:
                    peer.sendall(encode([CALL]))

        def starting(batch: StepBatch, lora: PassLora | None) -> Pass:
            return Watched(start(batch, lora), layers)  # type: ignore[return-value]

        monkeypatch.setattr(engine.engine.runner, "start", starting)
        for calls_at[0] in (2, 80 * engine.base.num_layers + 2):  # amid the writing of the cache, and amid the passes
            until = time.monotonic() + 200
            while len(layers) < calls_at[0]:
                assert time.monotonic() < until
                loop._iterate(channel, selector)
            assert len(layers) == calls_at[0], "the measurement has ended with the layer"
            assert (engine.engine.blocks.free, engine.engine.store.residents(), engine.engine.store.leases) == held
            loop._iterate(channel, selector)
            assert engine.engine.busy, "the call is what comes next"
            while engine.engine.busy:
                loop._iterate(channel, selector)
            loop._report(channel)
            events = received(peer)
            assert [type(e) for e in events if isinstance(e, Generated | Finished)] == [Generated, Generated, Finished]
            assert all(event.measuring is not None for event in events if isinstance(event, Stats))
            layers[:] = range(calls_at[0])  # what the call took does not count
        loop._iterate(channel, selector)
        assert len(layers) > calls_at[0], "it goes on"
    assert (engine.engine.blocks.free, engine.engine.store.residents(), engine.engine.store.leases) == held


def test_an_engine_is_heard_of_amid_a_slice(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of what the measurement has borrowed is seen."""
    engine = make_engine()
    monkeypatch.setattr(engine_loop, "QUIET_S", 0.0)
    monkeypatch.setattr(engine_loop, "STATS_INTERVAL", 0.0)
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    free, resident, layers = engine.engine.blocks.free, engine.engine.store.residents(), list[int]()
    start = engine.engine.runner.start
    monkeypatch.setattr(engine.engine.runner, "start", lambda batch, lora: CountedPass(start(batch, lora), layers))
    with loop_of(engine, idle, tmp_path) as (loop, channel, peer), selectors.DefaultSelector() as selector:
        selector.register(channel.socket, selectors.EVENT_READ)
        until = time.monotonic() + 200
        while not layers:
            assert time.monotonic() < until
            received(peer)
            loop._iterate(channel, selector)
        pictures = [event for event in received(peer) if isinstance(event, Stats)]
        assert len(pictures) > 20, "those that the socket took; without them a slice has none but its turn's own"
        assert {picture.kv_blocks_free for picture in pictures} == {free}
        assert all(picture.residents == resident for picture in pictures)


def test_a_node_that_was_just_called_is_not_idle(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    monkeypatch.setattr(idle, "work", lambda _: pytest.fail("it has not been quiet for long enough"))
    with loop_of(engine, idle, tmp_path) as (loop, channel, peer), selectors.DefaultSelector() as selector:
        selector.register(channel.socket, selectors.EVENT_READ)
        loop._active_at -= 60.0
        peer.sendall(encode([CALL]))
        loop._iterate(channel, selector)
        while engine.engine.busy:
            loop._iterate(channel, selector)
        loop._iterate(channel, selector)


def test_adapters_that_calls_have_brought_stay(
    make_engine: MakeEngine, stories_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they leave hardly any room: fewer made-up ones then."""
    engine = make_engine(adapter_memory=1 << 19)
    for number, directory in enumerate(list(stories_adapters.values()) * 4):
        engine.submit([1, 70], 1, engine.deploy(directory, f"f{number}"))
        engine.run()
    store = engine.engine.store
    resident = store.residents()
    assert resident
    monkeypatch.setattr(idle_module, "SLICE_S", 20.0)
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    until, asked = time.monotonic() + 200, list[bool]()

    def after_some_passes() -> bool:
        asked.append(True)
        return idle._passes > 3

    while idle._passes <= 3:
        assert time.monotonic() < until
        idle.work(after_some_passes)
    assert asked
    assert (store.residents(), store.leases) == (resident, 0)


@pytest.mark.parametrize(("used_by_others", "waits"), [(0.05, False), (0.9, True)])
def test_slices_are_far_apart_while_others_use_the_processors(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, used_by_others: float, waits: bool
) -> None:
    engine = make_engine()
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    monkeypatch.setattr(idle_base, "others_share", lambda before, after: used_by_others)
    pause = 0.3
    monkeypatch.setattr(idle_base, "SHARED_PAUSE_S", pause)
    until = time.monotonic() + 200
    while not idle.work(lambda: False):
        assert time.monotonic() < until
    ended = time.monotonic()
    begun = idle.work(lambda: False)
    assert begun is not waits or time.monotonic() > ended + pause
    while not begun:
        assert time.monotonic() < until
        begun = idle.work(lambda: False)
    assert not waits or time.monotonic() > ended + pause - 0.05


def test_a_fit_that_does_not_converge_ends_no_engine(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    idle._fits = Future()
    idle._fits.set_exception(ValueError("least squares of (40, 4) did not converge"))
    assert idle.work(lambda: False)
    assert not idle.ended
    assert getattr(caplog.records[-1], "reason", "") == "least squares of (40, 4) did not converge"


def test_a_node_without_room_says_that_it_has_no_model(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(kv_memory=2 * 20480)
    monkeypatch.setattr(idle_base, "PAUSE_S", 0.0)
    idle, until = IdleMeasurement(engine.engine, engine.config, engine.base), time.monotonic() + 200
    while not idle.ended:
        assert time.monotonic() < until
        idle.work(lambda: False)
    assert (engine.engine.drift, engine.engine.measuring) == (None, None)
    assert caplog.messages[-1] == "no performance model: run `garnish profile`"
