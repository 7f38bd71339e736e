"""A node's engine process that drives the real vLLM, and this test as its API process."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from adapters.base_model import load_base_model
from adapters.open_store import open_store
from adapters.registry import Registry
from cluster.frames import Frames
from cluster.messages import Adapter, GenerateRequest, Sampling
from node_agent.config import EngineConfig, EngineProcessConfig, VllmConfig
from node_agent.engine_loop import STATS_INTERVAL
from node_agent.ipc import (
    Admitted,
    Answer,
    Cancel,
    Command,
    EngineEvent,
    Finished,
    Generated,
    PromptScored,
    Ready,
    Stats,
    Submit,
    Top,
    encode,
    event_decoder,
)
from node_agent.vllm.folders import MEMORY
from node_agent.vllm.own_folder import PREFIX
from node_agent.vllm.watch import CHECK_S
from tests.support.local_engine import deploy_adapter
from tests.support.processes import processes, tree

ROOT = Path(__file__).parents[2]
START_S, END_S = 1000.0, 120.0
"""Seconds for the start, longer than an engine process's own bound on it, and for the end."""
GREEDY = Sampling(temperature=0.0)
ARGUMENTS = {"max_loras": 2, "max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True}
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TMPDIR": "/tmp",
}


@dataclass
class Outcome:
    """What the engine said about one request."""

    admitted: str = ""
    tokens: list[int] = field(default_factory=list)
    tops: list[Top | None] = field(default_factory=list)
    scores: list[Top] = field(default_factory=list)
    finished: Finished | None = None


class VllmProcess:
    """Context with the running process. Its methods may be called by any thread."""

    def __init__(self, python: Path, model_dir: Path, registry: Path, folder: Path, **settings: Any) -> None:
        """`settings`: vLLM's arguments, `answer_s`, fields of EngineConfig, `module`, which is run, `environment`, and
        `waits`: whether the context is entered once vLLM has started, or at once."""
        answer_s, self._module = settings.pop("answer_s", 60.0), settings.pop("module", "node_agent.vllm.process")
        self._environment, self._waits = settings.pop("environment", {}), settings.pop("waits", True)
        fields = {key: settings.pop(key) for key in list(settings) if key in EngineConfig.__struct_fields__}
        config = EngineConfig(
            model_dir=str(model_dir),
            base_id=model_dir.name,
            registry=str(registry),
            engine="vllm",
            vllm=VllmConfig(str(python), ARGUMENTS | settings, answer_s=answer_s),
            **({"dtype": "float32"} | fields),
        )
        self.registry = Registry(open_store(str(registry)), load_base_model(model_dir))
        self.log = folder / "log"
        self._path = folder / "socket"
        self._config = EngineProcessConfig(socket=str(self._path), parent=os.getpid(), engine=config)
        self._python = python
        self._count = 0
        self._events = threading.Condition()
        self.outcomes: dict[str, Outcome] = {}
        self.answers: dict[str, Answer] = {}
        self.stats: Stats | None = None
        self.stats_number = 0
        self.ready: Ready | None = None
        self.gone = False
        """whether the engine has closed the connection"""
        self.tree: list[int] = []
        """ids of the engine process and of all below it"""
        self.folders: set[Path] = set()
        """folders of this process: of adapters in memory, and of temporary files"""
        self.shared_memory: set[Path] = set()
        self.sockets: set[Path] = set()
        """files of Unix sockets on which the processes listen"""

    def __enter__(self) -> VllmProcess:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen()
        self._server.settimeout(START_S)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(self._python), "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
                env={**os.environ, **SETTINGS, **self._environment, "PYTHONPATH": str(ROOT)},
            )
        assert self.process.stdin is not None
        with self.process.stdin as stream:
            stream.write(msgspec.json.encode(self._config))
        if not self._waits:
            return self
        try:
            self._connection = self._accept()
            self._reader = threading.Thread(target=self._read)
            self._reader.start()
            self.wait(lambda: self.ready is not None, END_S)
        except BaseException:
            self._end()
            raise
        self.record_parts()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        if self._waits:
            self._reader.join(END_S)

    def record_parts(self) -> None:
        """Records the processes that there are now, their shared memory, their sockets' files, and their folders."""
        self.tree = tree(self.process.pid, processes())
        self.folders = folders_of(self.process.pid)
        self.shared_memory = {path for pid in self.tree for path in shared_memory_of(pid)}
        self.sockets = {path for pid in self.tree for path in sockets_of(pid)}

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._server.close()

    def _accept(self) -> socket.socket:
        deadline = time.monotonic() + START_S
        self._server.settimeout(0.5)
        while True:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                code = self.process.poll()
                if code is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the engine did not start ({code}): {self.errors()}") from None
                continue
            connection.settimeout(None)
            return connection

    def errors(self) -> list[dict[str, Any]]:
        """Returns the errors in the log, without those of vLLM itself."""
        errors = [line for line in self.lines() if line.get("level") == "error"]
        return [line for line in errors if not line["logger"].startswith(("vllm.", "printed"))]

    def lines(self) -> list[dict[str, Any]]:
        """Returns the log's lines of JSON."""
        found: list[dict[str, Any]] = []
        for line in self.log.read_text().splitlines():
            if line.startswith("{"):
                found.append(json.loads(line))
        return found

    # --- for tests

    @property
    def adapters_folder(self) -> Path:
        (found,) = [folder for folder in self.folders if folder.parent == MEMORY]
        return found

    def wait_for_checks(self, count: int) -> None:
        """Waits until an idle engine has compared its slots with vLLM's so often."""
        number = self.stats_number + count * math.ceil((CHECK_S + 1) / STATS_INTERVAL)
        self.wait(lambda: self.stats_number >= number, 20 * count * CHECK_S)

    def deploy(self, directory: Path, name: str | None = None) -> Adapter:
        return deploy_adapter(self.registry, directory, name)

    def submit(
        self,
        tokens: list[int],
        max_tokens: int,
        adapter: Adapter | None = None,
        sampling: Sampling = GREEDY,
        timeout: float = 120.0,
        ignore_eos: bool = True,
        tenant: str = "test",
        **fields: Any,
    ) -> str:
        """`fields`: further ones of GenerateRequest."""
        with self._events:
            self._count += 1
            request = f"r{self._count}"
            self.outcomes[request] = Outcome()
        self.send(
            Submit(
                GenerateRequest(
                    request, "", tenant, tokens, max_tokens, sampling, timeout, adapter, ignore_eos=ignore_eos, **fields
                )
            )
        )
        return request

    def cancel(self, request: str) -> None:
        self.send(Cancel(request))

    def send(self, command: Command) -> None:
        with self._events:
            self._connection.sendall(encode([command]))

    def wait(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        """Waits until the condition holds, which is checked at each event. Raises TimeoutError."""
        with self._events:
            if not self._events.wait_for(lambda: condition() or self.gone, seconds) or not condition():
                raise TimeoutError(f"gone: {self.gone}, code {self.process.poll()}, errors: {self.errors()}")

    def finish(self, request: str, seconds: float = 120.0) -> Outcome:
        """Returns the outcome of a request once it has ended."""
        outcome = self.outcomes[request]
        self.wait(lambda: outcome.finished is not None, seconds)
        return outcome

    def wait_until_idle(self) -> Stats:
        """Returns a snapshot of the engine that was made from now on, with nothing in flight."""
        number = self.stats_number

        def idle() -> bool:
            found = self.stats
            return self.stats_number > number + 1 and found is not None and not (found.running or found.queued)

        self.wait(idle)
        assert self.stats is not None
        return self.stats

    # --- inside

    def _read(self) -> None:
        frames = Frames()
        try:
            while chunk := self._connection.recv(1 << 20):
                with self._events:
                    for body in frames.feed(chunk):
                        for event in event_decoder.decode(body):
                            self._take(event)
                    self._events.notify_all()
        except OSError:
            pass
        with self._events:
            self.gone = True
            self._events.notify_all()

    def _take(self, event: EngineEvent) -> None:
        match event:
            case Ready():
                self.ready = event
            case Stats():
                self.stats, self.stats_number = event, self.stats_number + 1
            case Answer():
                self.answers[event.id] = event
            case Admitted():
                self.outcomes[event.id].admitted = event.state
            case Generated():
                self.outcomes[event.id].tokens.append(event.token_id)
                self.outcomes[event.id].tops.append(event.top)
            case PromptScored():
                self.outcomes[event.id].scores += event.scores
            case Finished():
                self.outcomes[event.id].finished = event


def folders_of(pid: int) -> set[Path]:
    """Returns the process's own folders: of adapters in memory, and of temporary files."""
    return {Path(link) for link in links_of(pid) if Path(link).name.startswith(PREFIX)}


def shared_memory_of(pid: int) -> set[Path]:
    """Returns the files of shared memory that the process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    mapped = {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in mapped if path.parent == MEMORY and path.exists()}


def sockets_of(pid: int) -> set[Path]:
    """Returns the files of the Unix sockets that the process has bound."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    bound = {f"socket:[{line[6]}]": Path(line[7]) for line in lines if len(line) > 7 and line[7].startswith("/")}
    return {bound[link] for link in links_of(pid) if link in bound}


def links_of(pid: int) -> list[str]:
    """Returns what the process's descriptors are."""
    links: list[str] = []
    with suppress(OSError):  # it has ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                links.append(os.readlink(link))
    return links


def core_and_worker(vllm: VllmProcess) -> tuple[int, int]:
    """Returns the ids of vLLM's engine core and of its worker. Raises ValueError if they are not there."""
    known = processes()
    pids = tree(vllm.process.pid, known)
    (core,) = [pid for pid in pids if name_of(pid).startswith("VLLM::EngineCor")]
    (worker,) = [pid for pid in pids if known[pid][0] == core and name_of(pid).startswith("VLLM::Worker")]
    return core, worker


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def assert_ended(vllm: VllmProcess, code: int = 1, seconds: float = 60.0) -> None:
    """The engine process ends with this code within the time, with all of vLLM's processes, folders, sockets and shared
    memory."""
    assert vllm.process.wait(seconds) == code
    wait_for(lambda: not living(vllm.tree), seconds)
    left = vllm.shared_memory | vllm.folders | vllm.sockets
    wait_for(lambda: not [path for path in left if path.exists()], seconds)


def living(pids: list[int]) -> list[int]:
    """Returns those of the processes that have not ended."""
    known = processes()
    return [pid for pid in pids if pid in known and known[pid][1] != "Z"]


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    """Waits until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)
