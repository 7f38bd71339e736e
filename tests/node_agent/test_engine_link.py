"""The engine's socket: who may connect, what ends a connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.frames import frame
from node_agent.api.engine_link import EngineLink, LinkDown
from node_agent.ipc import Cancel, EngineEvent, Ready, encode
from tests.node_agent.scripted_engine import READY, ScriptedEngine, admitted, finished
from tests.node_agent.served_node import run_scenario


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, object]] = asyncio.Queue()

    def engine_ready(self, ready: Ready) -> None:
        self.told.put_nowait(("ready", ready))

    def engine_events(self, events: list[EngineEvent]) -> None:
        self.told.put_nowait(("events", events))

    def engine_gone(self, reason: str) -> None:
        self.told.put_nowait(("gone", reason))


async def listening(path: Path, silence_limit: float = 60.0) -> tuple[EngineLink, Listener]:
    listener = Listener()
    link = EngineLink(path, listener, silence_limit)
    await link.start()
    return link, listener


def test_events_come_in_order_whatever_the_chunks(tmp_path: Path) -> None:
    async def scenario() -> None:
        link, listener = await listening(tmp_path / "run" / "engine.sock")
        engine = await ScriptedEngine.connect(tmp_path / "run" / "engine.sock", ready=None)
        data = encode([READY, admitted("a")]) + encode([finished("a")])
        for index in range(len(data)):
            engine.writer.write(data[index : index + 1])
            await engine.writer.drain()
        assert await listener.told.get() == ("ready", READY)
        assert await listener.told.get() == ("events", [admitted("a")])
        assert await listener.told.get() == ("events", [finished("a")])
        link.send(Cancel("a"))
        assert await engine.hear() == Cancel("a")
        await engine.close()
        assert (await listener.told.get())[0] == "gone"
        with pytest.raises(LinkDown, match="no engine"):
            link.send(Cancel("a"))
        await link.stop()
        assert not (tmp_path / "run" / "engine.sock").exists()

    run_scenario(scenario())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff" + bytes(100),
        frame(b"\xc1"),
        frame(b""),
        encode([]),
        encode([admitted("a")]),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["huge frame", "no msgpack", "empty", "no message", "not ready first", "http"],
)
def test_who_does_not_say_ready_first_is_hung_up_on(tmp_path: Path, garbage: bytes) -> None:
    async def scenario() -> None:
        link, listener = await listening(tmp_path / "engine.sock")
        stranger = await ScriptedEngine.connect(tmp_path / "engine.sock", ready=None)
        stranger.writer.write(garbage)
        assert await stranger.hung_up()
        await stranger.close()
        engine = await ScriptedEngine.connect(tmp_path / "engine.sock")
        assert await listener.told.get() == ("ready", READY), "nobody was told of the stranger"
        await engine.close()
        await link.stop()

    run_scenario(scenario())


def test_a_stranger_does_not_disturb_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        link, listener = await listening(tmp_path / "engine.sock")
        engine = await ScriptedEngine.connect(tmp_path / "engine.sock")
        assert await listener.told.get() == ("ready", READY)
        silent = await ScriptedEngine.connect(tmp_path / "engine.sock", ready=None)
        stranger = await ScriptedEngine.connect(tmp_path / "engine.sock", ready=None)
        await stranger.say(admitted("a"))
        assert await stranger.hung_up()
        await engine.say(admitted("b"))
        assert await listener.told.get() == ("events", [admitted("b")])
        link.send(Cancel("b"))
        assert await engine.hear() == Cancel("b")
        await link.stop()
        assert await engine.hung_up()
        assert await silent.hung_up()
        for peer in (engine, silent, stranger):
            await peer.close()

    run_scenario(scenario())


def test_of_several_new_engines_one_stays_and_the_others_are_told_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        link, listener = await listening(tmp_path / "engine.sock")
        peers = [await ScriptedEngine.connect(tmp_path / "engine.sock", ready=None) for _ in range(5)]
        await asyncio.gather(*(peer.say(READY) for peer in peers))
        told = [(await listener.told.get())[0] for _ in range(9)]
        assert told == ["ready", *["gone", "ready"] * 4]
        await link.stop()
        assert (await listener.told.get())[0] == "gone"
        for peer in peers:
            await peer.close()

    run_scenario(scenario())


def test_an_engine_that_breaks_the_protocol_later_counts_as_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        link, listener = await listening(tmp_path / "engine.sock")
        engine = await ScriptedEngine.connect(tmp_path / "engine.sock")
        engine.writer.write(frame(b"\xc1"))
        assert await engine.hung_up()
        assert await listener.told.get() == ("ready", READY)
        what, reason = await listener.told.get()
        assert what == "gone"
        assert "protocol" in str(reason)
        await engine.close()
        await link.stop()

    run_scenario(scenario())


class BrokenListener(Listener):
    def engine_events(self, events: list[EngineEvent]) -> None:
        raise RuntimeError("a defect")


def test_a_defect_in_handling_an_event_ends_the_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        listener = BrokenListener()
        link = EngineLink(tmp_path / "engine.sock", listener)
        await link.start()
        engine = await ScriptedEngine.connect(tmp_path / "engine.sock")
        await engine.say(admitted("a"))
        assert await engine.hung_up()
        assert [(await listener.told.get())[0] for _ in range(2)] == ["ready", "gone"]
        await engine.close()
        await link.stop()

    run_scenario(scenario())


def test_a_silent_engine_counts_as_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        link, listener = await listening(tmp_path / "engine.sock", silence_limit=0.05)
        engine = await ScriptedEngine.connect(tmp_path / "engine.sock")
        assert await engine.hung_up()
        assert await listener.told.get() == ("ready", READY)
        what, reason = await listener.told.get()
        assert what == "gone"
        assert "sent nothing" in str(reason)
        await engine.close()
        await link.stop()

    run_scenario(scenario())


def test_a_socket_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        _left, _ = await listening(tmp_path / "engine.sock")
        link, listener = await listening(tmp_path / "engine.sock")
        engine = await ScriptedEngine.connect(tmp_path / "engine.sock")
        assert await listener.told.get() == ("ready", READY)
        await engine.close()
        await link.stop()
        await _left.stop()

    run_scenario(scenario())


def test_a_path_too_long_for_a_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(OSError, match="use a shorter directory"):
            await listening(tmp_path / ("x" * 100) / "engine.sock")

    run_scenario(scenario())
