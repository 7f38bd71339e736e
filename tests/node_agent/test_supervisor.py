"""The node's processes as they really are: supervisor, API process and engine on the small real model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from cluster.messages import Done, Failed, Started, Token
from cluster.news import NodeRecord
from cluster.secret import authorization, create_secret
from node_agent.config import ApiProcessConfig, EngineProcessConfig, NodeConfig
from node_agent.supervisor import FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY, Child, Signals, stop
from tests.node_agent.served_node import Gateway, Stream, gateway_server, node_config, request_of, run_scenario

ROOT = Path(__file__).parents[2]
GREEDY = ROOT / "examples" / "models" / "stories260K" / "stories260K.greedy200.txt"
RUN = """
import sys, msgspec
from node_agent.config import NodeConfig
from node_agent.supervisor import run
sys.exit(run(msgspec.json.decode(sys.argv[1], type=NodeConfig)))
"""


class Supervised:
    """A supervisor process, its log and its children."""

    def __init__(self, process: asyncio.subprocess.Process, gateway: Gateway, secret: str) -> None:
        self.process = process
        self.gateway = gateway
        self.secret = secret
        self.pids: dict[str, int] = {}
        self.lines: list[dict[str, object]] = []

    async def logged(self, message: str, child: str) -> dict[str, object]:
        """The next line of the log with that message about that child."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            entry = json.loads(line) if line.startswith(b"{") else {}
            if entry.get("message") == "child started":
                self.pids[entry["child"]] = entry["pid"]
            if (entry.get("message"), entry.get("child")) == (message, child):
                return entry
        raise AssertionError(f"the log ended without {message!r} about {child}")

    async def problems(self) -> list[dict[str, object]]:
        """The lines of the log until its end that are more than information."""
        assert self.process.stderr is not None
        entries = [json.loads(line) async for line in self.process.stderr if line.startswith(b"{")]
        assert [entry["child"] for entry in entries if entry["message"] == "child stopped"] == ["api", "engine"]
        return [entry for entry in entries if entry["level"] != "info"]

    async def ready(self, not_epoch: str = "") -> NodeRecord:
        return await self.gateway.record_where(lambda r: r.state == "ready" and r.epoch != not_epoch)

    @contextlib.asynccontextmanager
    async def generate(self, record: NodeRecord, **fields: object) -> AsyncIterator[Stream]:
        body = msgspec.msgpack.encode(request_of(base=record.base, **fields))
        async with (
            aiohttp.ClientSession(headers=authorization(self.secret)) as session,
            session.post(record.url + "/generate", data=body) as response,
        ):
            yield Stream(response)

    async def greedy_text(self, record: NodeRecord) -> bytes:
        async with self.generate(record, max_tokens=200) as stream:
            events = await stream.rest()
        assert isinstance(events[-1], Done)
        return "".join(event.text for event in events if isinstance(event, Token | Done)).encode()


@contextlib.asynccontextmanager
async def supervised(directory: Path, model_dir: Path, **engine: object) -> AsyncIterator[Supervised]:
    """`engine`: settings of it."""
    secret = create_secret(directory / "cluster.secret")
    (directory / "registry").mkdir(exist_ok=True)
    gateway = Gateway()
    async with gateway_server(gateway) as url:
        settings = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_memory": 1 << 24, **engine}
        config = node_config(directory, model_dir, url, **settings)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RUN, msgspec.json.encode(config).decode()),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        node = Supervised(process, gateway, secret)
        try:
            yield node
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


def wait_for_end(pid: int) -> None:
    """Returns when the process, which need not be our child, has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], 30.0)[0], f"process {pid} still lives"
    finally:
        os.close(fd)


async def reports_an_engine_that_can_not_start(node: Supervised) -> None:
    """The API process lives on meanwhile and says that it warms."""
    assert (await node.logged("child ended", "engine"))["code"] == 1
    record = await node.gateway.record_where(lambda r: "exit code 1" in r.error)
    assert (record.state, record.base) == ("warming", "")


async def passes_over_a_stopped_engine(node: Supervised, record: NodeRecord) -> NodeRecord:
    """SIGSTOP to the engine: its connection stays, and nobody waits for it until it goes on."""
    async with node.generate(record, max_tokens=400, ignore_eos=True, id="cut") as stream:
        assert isinstance(await stream.next(), Started)
        assert isinstance(await stream.next(), Token)
        os.kill(node.pids["engine"], signal.SIGSTOP)
        stopped = await node.gateway.record_where(lambda r: r.state != "ready")
        assert "has not responded" in stopped.error
        failed = (await stream.rest())[-1]
    assert isinstance(failed, Failed)
    assert (failed.type, failed.retryable) == ("node_failed", False)
    os.kill(node.pids["engine"], signal.SIGCONT)
    again = await node.gateway.record_where(lambda r: r.state == "ready" and r.seq > stopped.seq)
    assert again.running == 0
    assert await node.greedy_text(again) == GREEDY.read_bytes()
    return again


async def starts_a_killed_engine_again(node: Supervised, record: NodeRecord) -> NodeRecord:
    async with node.generate(record, max_tokens=400, ignore_eos=True, id="cut again") as stream:
        assert isinstance(await stream.next(), Started)
        assert isinstance(await stream.next(), Token)
        os.kill(node.pids["engine"], signal.SIGKILL)
        failed = (await stream.rest())[-1]
    assert isinstance(failed, Failed)
    assert (failed.type, failed.retryable) == ("node_failed", False)
    assert (await node.logged("child ended", "engine"))["code"] == -signal.SIGKILL
    assert (await node.gateway.record_where(lambda r: r.state == "warming")).error
    record = await node.ready()
    assert await node.greedy_text(record) == GREEDY.read_bytes()
    return record


async def starts_a_killed_api_process_again(node: Supervised, record: NodeRecord) -> NodeRecord:
    os.kill(node.pids["api"], signal.SIGKILL)
    await node.logged("child started", "api")
    again = await node.ready(not_epoch=record.epoch)
    assert await node.greedy_text(again) == GREEDY.read_bytes(), "the engine connected again and is still warm"
    return again


async def stops_in_order(node: Supervised, record: NodeRecord) -> None:
    async with node.generate(record, max_tokens=50, ignore_eos=True) as stream:
        assert isinstance(await stream.next(), Started)
        node.process.send_signal(signal.SIGTERM)
        assert isinstance((await stream.rest())[-1], Done), "an open stream may end"
    assert await node.problems() == [], "what is told to stop, and does, is no problem"
    assert await node.process.wait() == 0
    for pid in node.pids.values():
        wait_for_end(pid)


def test_processes_come_back_whatever_ends_them(tmp_path: Path, stories_dir: Path) -> None:
    """One node: an engine that lacks its weights at first, one that is stopped, both processes killed, and the end."""
    model_dir = tmp_path / "model"
    shutil.copytree(stories_dir, model_dir)
    weights = model_dir / "model.safetensors"
    weights.rename(tmp_path / "kept")

    async def scenario() -> None:
        async with supervised(tmp_path, model_dir) as node:
            await reports_an_engine_that_can_not_start(node)
            (tmp_path / "kept").rename(weights)
            record = await node.ready()
            await node.logged("child started", "engine")
            assert await node.greedy_text(record) == GREEDY.read_bytes()
            record = await passes_over_a_stopped_engine(node, record)
            record = await starts_a_killed_engine_again(node, record)
            record = await starts_a_killed_api_process_again(node, record)
            await stops_in_order(node, record)

    run_scenario(scenario())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_node(tmp_path: Path, stories_dir: Path, number: signal.Signals) -> None:
    """SIGINT ends a node that still warms, SIGKILL the supervisor of one that is ready."""

    async def scenario() -> None:
        async with supervised(tmp_path, stories_dir) as node:
            await node.logged("child started", "engine")
            if number == signal.SIGKILL:
                await node.ready()
            node.process.send_signal(number)
            assert await node.process.wait() == (0 if number == signal.SIGINT else -number)
            for pid in node.pids.values():
                await asyncio.to_thread(wait_for_end, pid)

    run_scenario(scenario())


def config_of(directory: Path) -> EngineProcessConfig:
    node: NodeConfig = node_config(directory, directory, "http://127.0.0.1:1")
    return EngineProcessConfig(socket="unused", engine=node.engine)


def end_of(child: Child) -> None:
    """Waits until the child's process has ended, without reaping it."""
    assert child.pid is not None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_restarts_back_off_and_a_steady_process_starts_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Times are given, not measured; the module (the Zen of Python) ends at once."""
    child, now, expected = Child("zen", "this", config_of(tmp_path)), 100.0, FIRST_BACKOFF_S
    for _ in range(8):
        assert child.tend(now) == STEADY, "it is started"
        end_of(child)
        assert child.tend(now) == pytest.approx(expected)
        assert child.pid is None, "reaped, and not started before its time"
        now, expected = now + expected, min(2 * expected, MAX_BACKOFF_S)
    child.tend(now)
    end_of(child)
    assert child.tend(now + STEADY) == pytest.approx(FIRST_BACKOFF_S), "it had lived long enough to count as healthy"


def test_a_killed_child_is_reaped(tmp_path: Path) -> None:
    child = Child("server", "http.server", config_of(tmp_path))
    child.tend(0.0)
    pid = child.pid
    assert pid is not None
    child.kill()
    assert child.pid is None
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(3600)
"""


def test_who_does_not_stop_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    os.mkfifo(tmp_path / "output")
    output = os.open(tmp_path / "output", os.O_RDONLY | os.O_NONBLOCK)
    child = Child("stubborn", "stubborn", config_of(tmp_path), output=tmp_path / "output")
    with Signals() as signals:
        child.tend(0.0)
        assert select.select([output], [], [], 30.0)[0], "it says that it is deaf now"
        pid = child.pid
        assert pid is not None
        stop([child], signals, grace=0.05)
    os.close(output)
    assert child.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_signals_restore_what_was_there() -> None:
    before = [signal.getsignal(number) for number in Signals.NUMBERS]
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait(30.0)
        assert signals.stop_requested == 1
        os.kill(os.getpid(), signal.SIGINT)
        signals.wait(30.0)
        assert signals.stop_requested == 2
    assert [signal.getsignal(number) for number in Signals.NUMBERS] == before


def test_a_child_whose_parent_is_gone_does_not_start(tmp_path: Path, stories_dir: Path) -> None:
    node = node_config(tmp_path, stories_dir, "http://127.0.0.1:1")
    orphan = ApiProcessConfig(socket=str(tmp_path / "engine.sock"), parent=os.getppid(), node=node)
    done = subprocess.run(
        [sys.executable, "-m", "node_agent.api"],
        input=msgspec.json.encode(orphan),
        capture_output=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 1
    assert b"is gone" in done.stderr


def test_only_the_engine_pays_for_torch() -> None:
    """Neither the supervisor nor, in the same process, the API process's modules load it."""
    probe = """
import sys
for name in ("node_agent.supervisor", "node_agent.api.app"):
    __import__(name)
    if {"torch", "transformers"} & {*sys.modules}:
        sys.exit(name)
"""
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
