"""The engine process's loop, before a socket: what comes while a pass is computed is taken between two layers."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.local_engine import MakeEngine
from cluster.frames import Frames
from cluster.messages import GenerateRequest, Sampling
from node_agent.engine_process import Channel, Loop, WakeUp, ready_message
from node_agent.ipc import Cancel, EngineEvent, Finished, Generated, Submit, encode, event_decoder
from tests.node_agent.test_newcomers import STORY, flooded


@pytest.fixture
def wake() -> Iterator[WakeUp]:
    made = WakeUp()
    yield made
    os.close(made.fd)


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


def test_calls_and_cancellations_do_not_wait_for_the_pass(
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
        sampling, advance, layers = Sampling(temperature=0), engine.engine.hot.advance, list[bool]()

        def advancing() -> bool:
            if len(layers) == 1:  # while the second layer is computed
                late = Submit(GenerateRequest("late", "", "v0", STORY, 2, sampling, timeout=60.0, ignore_eos=True))
                peer.sendall(encode([Cancel(computed[0]), late]))
            layers.append(advance())
            return layers[-1]

        monkeypatch.setattr(engine.engine.hot, "advance", advancing)
        loop = Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: False)
        loop._turn(channel, selector)
        events = [event for event in received(peer) if isinstance(event, Generated | Finished)]
        assert layers == [True] * (engine.base.num_layers - 1) + [False]
        assert [(type(event), event.id) for event in events[:2]] == [(Finished, computed[0]), (Generated, "late")]
        assert [event.id for event in events[2:]] == computed[1:], "then the pass's tokens come"
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
        advance = engine.engine.hot.advance

        def advancing() -> bool:
            peer.close()
            return advance()

        monkeypatch.setattr(engine.engine.hot, "advance", advancing)
        Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: False).serve(channel)
        channel.close()
    assert engine.engine.hot.open is None
    assert not engine.engine.busy
    engine.assert_clean()
