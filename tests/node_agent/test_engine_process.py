"""The engine process's loop, before a socket: what a pass computed is told before the next one begins."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cluster.frames import Frames
from cluster.messages import GenerateRequest, Sampling
from cluster.residency import WantedResidency
from node_agent.coldstart.auto_workers import TYPICAL
from node_agent.coldstart.cold_starts import WorkersDecision
from node_agent.coldstart.worker_manager import WorkerManager
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.engine.hot import Computed, OutOfMemory
from node_agent.engine.joining import Joined
from node_agent.engine.loop import Engine
from node_agent.engine.rows import Row
from node_agent.engine_channel import Channel, WakeUp
from node_agent.engine_loop import Loop
from node_agent.engine_process import ready_message
from node_agent.idle_work import QUIET_S
from node_agent.ipc import Cancel, EngineEvent, Finished, Generated, PrefetchHints, Ready, Submit, encode, event_decoder
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.test_floods import STORY, flooded
from tests.support.local_engine import MakeEngine


@pytest.fixture
def wake() -> Iterator[WakeUp]:
    """It is closed before the engine, whose loads may still end."""
    with closing(WakeUp()) as made:
        yield made


def received(peer: socket.socket) -> list[EngineEvent]:
    """All that has been sent so far."""
    peer.setblocking(False)
    frames, found = Frames(), list[EngineEvent]()
    while True:
        try:
            chunk = peer.recv(1 << 20)
        except BlockingIOError:
            return found
        for body in frames.feed(chunk):
            found += event_decoder.decode(body)


def test_a_call_is_told_its_first_token_before_the_batch_goes_on(
    make_engine: MakeEngine, tmp_path: Path, wake: WakeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_rows=16)
    flooded(engine)
    computed = list(engine.engine.running)
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        channel = Channel(str(tmp_path / "socket"))
        peer, _ = server.accept()
        compute, told = engine.engine.hot.compute, list[list[str]]()

        def computing(rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
            told.append([event.id for event in received(peer) if isinstance(event, Generated | Finished)])
            return compute(rows, n_decode, joined)

        monkeypatch.setattr(engine.engine.hot, "compute", computing)
        late = GenerateRequest("late", "", "v0", STORY, 2, Sampling(temperature=0), timeout=60.0, ignore_eos=True)
        peer.sendall(encode([Cancel(computed[0]), Submit(late)]))
        loop = Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: False)
        loop._iterate(channel, selector)
        assert told == [[computed[0]], ["late"]], "who is cancelled is told before any pass"
        rest = [event.id for event in received(peer) if isinstance(event, Generated | Finished)]
        assert {*computed[1:], "late"} <= set(rest), "the batch, with the newcomer's next token"
        loop.drop_all()
        channel.close()
        peer.close()


def test_an_api_process_that_goes_amid_a_pass_leaves_nothing(
    make_engine: MakeEngine, tmp_path: Path, wake: WakeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass ends with it; the next one finds an empty engine."""
    engine = make_engine(max_rows=16)
    flooded(engine)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        channel = Channel(str(tmp_path / "socket"))
        peer, _ = server.accept()
        compute = engine.engine.hot.compute

        def computing(rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
            peer.close()
            return compute(rows, n_decode, joined)

        monkeypatch.setattr(engine.engine.hot, "compute", computing)
        Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: False).serve(channel)
        channel.close()
    assert not engine.engine.busy
    engine.assert_clean()


class DecidesOnce:
    """Idle work that changes the decision on CPU workers, as a judgement by new costs does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def work(self, should_yield: Callable[[], bool]) -> bool:
        self._engine.cold_start.decision = WorkersDecision(0, "no gain by other costs", (("cold", 12.0),))
        return True

    def close(self) -> None:
        return None


def test_another_decision_on_cpu_workers_is_told_once(make_engine: MakeEngine, tmp_path: Path, wake: WakeUp) -> None:
    engine = make_engine(cpu_workers=None)
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        channel = Channel(str(tmp_path / "socket"))
        peer, _ = server.accept()
        loop = Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: False)
        engine.engine.worker_manager = DecidesOnce(engine.engine)
        loop._active_at -= 2 * QUIET_S
        assert loop._measure(channel, selector)
        (told,) = [event for event in received(peer) if isinstance(event, Ready)]
        assert (told.cpu_workers_reason, told.cpu_workers_ms) == ("no gain by other costs", {"cold": 12.0})
        assert told == ready_message(engine.engine, engine.base) == loop.ready
        assert loop._measure(channel, selector)
        assert not [event for event in received(peer) if isinstance(event, Ready)]
        channel.close()
        peer.close()


@pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")
def test_neither_arriving_layers_nor_repeated_hints_end_a_measurement_of_cold_calls(
    make_engine: MakeEngine, tmp_path: Path, wake: WakeUp
) -> None:
    """Layers wake the engine as any load's do, and the gateway repeats its hints; any other message ends it."""
    sizes = {"adapter_memory": 4 << 20, "host_memory": 16 << 20}
    engine = make_engine(cpu_workers=1, load_link=LinkConfig(3e6), on_change=wake.set, **sizes)
    starts = engine.engine.cold_start
    assert TYPICAL in starts.unmeasured
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        channel = Channel(str(tmp_path / "socket"))
        peer, _ = server.accept()
        selector.register(channel.socket, selectors.EVENT_READ)
        selector.register(wake.fd, selectors.EVENT_READ)
        loop = Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: False)
        loop._active_at -= 2 * QUIET_S
        loop._stats_at = float("inf")
        peer.sendall(encode([Cancel("nobody")]))
        loop._measure(channel, selector)
        assert not starts.times.is_measured(TYPICAL) and TYPICAL in starts.unmeasured
        hints = PrefetchHints(WantedResidency([], 20.0, {"0" * 64: 60.0}))
        peer.sendall(encode([hints]))
        loop._receive(channel)
        assert not loop._arrived
        manager = engine.engine.worker_manager
        assert isinstance(manager, WorkerManager)
        manager._kinds_pause.until = 0.0
        peer.sendall(encode([hints]))
        assert loop._measure(channel, selector)
        assert starts.times.is_measured(TYPICAL) and TYPICAL not in starts.unmeasured
        channel.close()
        peer.close()
    engine.assert_clean()


def test_a_load_that_ends_after_the_wake_up_was_closed_writes_to_no_other_file(
    make_engine: MakeEngine, drawn_adapters: list[Path]
) -> None:
    """A loader thread may outlive the engine's loop, and the eventfd's number then belongs to whoever opened next."""
    wake, woken = WakeUp(), threading.Event()

    def set_and_tell() -> None:
        wake.set()
        woken.set()

    engine = make_engine(on_change=set_and_tell)
    link = HeldLink(engine)
    request = engine.submit(STORY, 2, engine.deploy(drawn_adapters[0]))
    engine.run(until=lambda: bool(engine.engine.running))
    wake.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        assert other == wake.fd, "the lowest free number is the one that was closed"
        woken.clear()
        link.open()
        engine.run()
        assert woken.is_set() and engine.outcomes[request].finished is not None
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)
    wake.close()  # once is enough


def test_a_signal_while_the_wake_up_is_closed(wake: WakeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler runs in the thread that closes, and must not wait for itself."""
    close, handled = os.close, list[int]()
    before = signal.signal(signal.SIGUSR1, lambda *_: (wake.set(), handled.append(wake.fd)))

    def close_and_signal(fd: int) -> None:
        close(fd)
        if fd == wake.fd:
            signal.raise_signal(signal.SIGUSR1)

    try:
        monkeypatch.setattr(os, "close", close_and_signal)
        wake.close()
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR1, before)
    assert handled == [wake.fd]
