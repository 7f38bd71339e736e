"""An engine that stands still is told from one that computes something long, and from a host that stood still."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from cluster.messages import Done, Failed, Started, Token
from node_agent.api import app, requests
from node_agent.engine.pulse import FIRST_S, MAX_PULSE_S, Pulse
from node_agent.heartbeat import Heartbeat, Watch, heartbeat_memory
from node_agent.supervisor import LOOK_S, MAX_SILENCE_S, Child
from tests.node_agent.scripted_engine import admitted, finished, tokens
from tests.node_agent.served_node import request_of, run_scenario, served_node
from tests.node_agent.test_supervisor import config_of, end_of
from tests.support.local_engine import MakeEngine

LOOK, SILENT, FAILED = 0.02, 0.2, 0.5


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API process looks at the heartbeat, and draws its conclusions, ten times as soon. It counts silence in its
    own looks, on the loop on which the test beats: a busy host delays both."""
    monkeypatch.setattr(app, "LOOK_S", LOOK)
    monkeypatch.setattr(requests, "SILENT_S", SILENT)
    monkeypatch.setattr(requests, "FAILED_S", FAILED)


@contextlib.asynccontextmanager
async def beating(heart: Heartbeat) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            heart.beat()
            await asyncio.sleep(LOOK)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


@pytest.fixture
def memory() -> Iterator[int]:
    fd = heartbeat_memory()
    yield fd
    os.close(fd)


def test_silence_is_counted_from_the_last_beat_in_the_watcher_s_looks(memory: int) -> None:
    heart, watch, now = Heartbeat(memory), Watch(memory, interval=1.0), 100.0
    assert watch.silence(now) == 0.0
    for _ in range(5):
        now += 1.0
        assert watch.silence(now) == 0.0, "no beat has come yet"
    heart.beat()
    assert [watch.silence(now + i) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    heart.beat()
    assert watch.silence(now + 4.0) == 0.0
    assert watch.silence(now + 500.0) == 2.0, "a watcher that stood still itself has not seen a silence"
    assert watch.silence(now + 501.0, os.getpid() + 1) == 0.0, "what another process says counts for nothing"


def test_an_announced_silence_is_not_overdue(memory: int) -> None:
    heart, watch = Heartbeat(memory), Watch(memory, interval=1.0)
    heart.beat(10.0)
    assert [watch.overdue(100.0 + i) for i in range(13)] == [0.0] * 11 + [1.0, 2.0]
    heart.beat()
    assert [watch.overdue(113.0 + i) for i in range(3)] == [0.0, 1.0, 2.0]


def test_an_engine_that_stands_still_gets_no_calls_and_its_streams_fail(
    tmp_path: Path, stories_dir: Path, soon: None
) -> None:
    """As those of one that has died do; when it goes on it finds them cancelled, and serves at once."""

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            heart = Heartbeat(node.heartbeat)
            engine = await node.engine()
            async with node.generate(request_of("queued")) as queued, node.generate(request_of("cut")) as running:
                async with beating(heart):
                    assert {(await engine.hear_submit()).id for _ in range(2)} == {"queued", "cut"}
                    await engine.say(admitted("cut"), *tokens("cut", [403]))
                    assert isinstance(await running.next(), Started)
                    assert isinstance(await running.next(), Token)
                    await asyncio.sleep(2 * SILENT)
                    assert (await node.record()).state == "ready", "it says nothing on its socket, but its loop goes on"
                record = await node.gateway.record_where(lambda r: r.state != "ready")
                assert (record.state, record.base) == ("warming", "fingerprint")
                assert "has not responded for" in record.error
                async with node.generate(request_of("late")) as late:
                    (refused,) = await late.rest()
                assert isinstance(refused, Failed) and (refused.type, refused.retryable) == ("unavailable", True)
                for stream, retryable in ((queued, True), (running, False)):
                    failed = (await stream.rest())[-1]
                    assert isinstance(failed, Failed)
                    assert (failed.type, failed.retryable) == ("node_failed", retryable)
            async with beating(heart):
                await node.record_where(lambda r: r.state == "ready" and not r.error)
                assert {(await engine.hear_cancel()).id for _ in range(2)} == {"queued", "cut"}
                await engine.say(*tokens("cut", [403]), finished("cut", "cancelled"))
                async with node.generate(request_of("again")) as stream:
                    assert (await engine.hear_submit()).id == "again"
                    await engine.say(finished("again"))
                    assert isinstance((await stream.rest())[-1], Done)

    run_scenario(scenario())


def test_a_long_pass_is_announced(tmp_path: Path, stories_dir: Path, soon: None) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            heart = Heartbeat(node.heartbeat)
            heart.beat(MAX_PULSE_S)
            engine = await node.engine()
            async with node.generate(request_of("long")) as stream:
                await engine.hear_submit()
                await asyncio.sleep(3 * SILENT)
                assert (await node.record()).state == "ready"
                await engine.say(admitted("long"), finished("long"))
                assert isinstance((await stream.rest())[-1], Done)

    run_scenario(scenario())


BEAT_ONCE = """
import msgspec, sys, time
from node_agent.config import EngineProcessConfig
from node_agent.heartbeat import Heartbeat
Heartbeat(msgspec.json.decode(sys.stdin.read(), type=EngineProcessConfig).heartbeat).beat()
print("beaten", flush=True)
time.sleep(3600)
"""


def test_the_supervisor_kills_an_engine_that_stands_still(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are given, not measured."""
    (tmp_path / "still.py").write_text(BEAT_ONCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    output = tmp_path / "output"
    watch, config = Watch(memory, LOOK_S), msgspec.structs.replace(config_of(tmp_path), heartbeat=memory)
    ends: list[int] = []
    child = Child("engine", "still", config, output=output, on_end=ends.append, watch=watch, inherited=memory)
    now = 100.0
    child.tend(now)
    while not (output.exists() and b"beaten" in output.read_bytes()):
        time.sleep(0.01)
    pid, silent = child.pid, 0.0
    child.tend(now)
    while silent < MAX_SILENCE_S - LOOK_S:
        now, silent = now + LOOK_S, silent + LOOK_S
        assert child.tend(now) == LOOK_S
        assert child.pid == pid and not ends
    child.tend(now + LOOK_S)
    end_of(child)
    assert child.tend(now + LOOK_S) > 0.0, "it is started again"
    assert ends == [-9]
    child.tend(now + 2 * LOOK_S)
    assert child.pid not in (None, pid)
    for _ in range(5):
        assert child.tend(now + 500.0) == LOOK_S
    assert child.pid is not None, "a new one is not judged by the beats of the one before"
    child.kill()


def test_how_long_a_stretch_takes_is_learnt_by_its_size() -> None:
    told: list[float] = []
    pulse = Pulse(compiles=False)
    pulse.report = told.append
    with pulse.computing("layers", 100):
        assert told == [0.0], "nothing is known yet"
        time.sleep(0.1)
    for size, layers, factor in ((100, 1, 1), (127, 4, 4), (60, 1, 1), (1, 1, 1), (256, 1, 4)):
        with pulse.computing("layers", size, layers):
            assert told[-1] >= 0.1 * factor, (size, layers)
        pulse._seconds["layers"] = {7: 0.1}
    with pulse.computing("end", 100):
        assert told[-1] == 0.0, "another kind of work"
    with pulse.computing("layers", 1 << 20, 32):
        assert told[-1] == MAX_PULSE_S


def test_kernels_may_be_compiled_at_first() -> None:
    told: list[float] = []
    pulse = Pulse(compiles=True)
    pulse.report = told.append
    for size in (8, 8, 100):
        with pulse.computing("layers", size):
            pass
    assert told[0] == told[2] == FIRST_S
    assert told[1] < 1.0


def test_an_engine_beats_before_whatever_it_computes(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a layer takes long, that is said before the next one."""
    engine = make_engine()
    prompt = [1, *range(10, 40)]
    told: list[float] = []
    engine.engine.pulse.report = told.append
    layer = engine.engine.runner.layers[2]
    forward = layer.forward

    def slow(*args: object, **rest: object) -> object:
        time.sleep(0.05)
        return forward(*args, **rest)

    monkeypatch.setattr(layer, "forward", slow)
    for _ in range(2):
        before = len(told)
        request = engine.submit(prompt, 1, ignore_eos=True)
        engine.run()
        assert engine.outcomes[request].finished is not None
        assert len(told) - before >= engine.base.num_layers + 1
    assert max(told[before:]) >= 0.05
