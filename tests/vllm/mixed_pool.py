"""One gateway with nodes of both engines, as an operator starts them one by one, and calls that read streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from tests.e2e.whole_service import Service, descendants, eventually
from tests.support.ports import free_port
from tests.vllm.vllm_process import ARGUMENTS, SETTINGS, START_S

ROOT = Path(__file__).parents[2]
STOP_S, CALL_S = 90.0, 240.0
STATED = ("--state", "state")
OWN, VLLM = "own", "vllm"
FILES = {OWN: "serverless.yml", VLLM: "vllm.yml"}
"""Names of the nodes, and the service file of each. The gateway has our own engine's."""
TENANT = "acme"


@dataclass
class Reply:
    """What a caller has read of a stream."""

    node: str = ""
    version: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    """the last event; empty until then"""
    error: str = ""

    @property
    def resumed(self) -> int:
        """Number of nodes that the answer went on from."""
        return int(self.last["timing"]["resumed"])


class Stream(threading.Thread):
    """A streamed call."""

    def __init__(self, pool: MixedPool, name: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._pool, self._name, self._body = pool, name, {"ignore_eos": True, "temperature": 0, **body, "stream": True}
        self.reply = Reply()
        self.start()

    def run(self) -> None:
        reply = self.reply
        try:
            with self._pool.client() as http, http.stream("POST", f"/invoke/{self._name}", json=self._body) as response:
                reply.node = response.headers.get("x-garnish-node", "")
                reply.version = int(response.headers.get("x-garnish-version", 0))
                if response.status_code != 200:
                    reply.error = f"{response.status_code}: {response.read().decode()}"
                    return
                self._read(response.iter_lines())
        except httpx.HTTPError as error:
            reply.error = repr(error)

    def _read(self, lines: Iterator[str]) -> None:
        reply, name = self.reply, ""
        for line in lines:
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = json.loads(line[6:])
                if name != "token":
                    reply.last = data
                    return
                reply.text += data["text"]
                reply.tokens += [data["token_id"]] if data["token_id"] is not None else []

    def wait_for_tokens(self, count: int) -> None:
        assert eventually(lambda: len(self.reply.tokens) >= count or not self.is_alive(), CALL_S), self._pool.logs()
        assert len(self.reply.tokens) >= count, (self.reply, self._pool.logs())

    def result(self) -> Reply:
        """Returns the whole reply, which has not failed."""
        self.join(CALL_S)
        assert "timing" in self.reply.last, (self.reply, self._pool.logs())
        return self.reply


class MixedPool:
    """Context with a gateway. Nodes are started by `start`."""

    def __init__(self, folder: Path, base: Path, python: Path, **vllm: Any) -> None:
        self.base = base
        self.service = Service(folder, free_port())
        node = {"dtype": "float32", "device": "cpu", "host_memory": "64MiB"}
        own = {**node, "adapter_memory": "64MiB", "kv_memory": "64MiB"}
        other = {**node, "engine": "vllm", "vllm": {"python": str(python), **ARGUMENTS, **vllm}}
        for name, settings in ((OWN, own), (VLLM, other)):
            file = {"service": "mixed", "base_model": str(base), "node": settings, "tenants": {TENANT: {}}}
            (folder / FILES[name]).write_text(json.dumps(file))
        self._parts = ExitStack()
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> MixedPool:
        try:
            self._spawn("gateway", OWN, "gateway", "--port", str(self.service.port))
            made = [self.service.state / name for name in ("cluster.secret", "credentials.toml")]
            assert eventually(lambda: all(path.exists() for path in made), 90), self.logs()
        except BaseException:
            self._parts.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    # --- nodes

    def start(self, *nodes: str, tree: Path = ROOT) -> None:
        """Starts nodes, and waits until they are ready. `tree`: directory of the build that they run."""
        before = self.epochs()
        for node in nodes:
            self._spawn(node, node, "node", "--gateway", self.service.url, "--node-id", node, tree=tree)
        assert eventually(lambda: self._are_new(nodes, before), START_S), self.logs()

    def stop(self, node: str) -> None:
        """Ends the node as an operator does, and waits for its end."""
        self._running[node].send_signal(signal.SIGTERM)
        assert self._running[node].wait(STOP_S) == 0, self.logs()

    def kill(self, node: str) -> None:
        """Kills the node's supervisor, with which its processes end."""
        self._running[node].kill()
        self._running[node].wait(STOP_S)

    def processes(self, node: str) -> dict[int, str]:
        return descendants(self._running[node].pid)

    def epochs(self) -> dict[str, str]:
        """Returns the epoch of each node that is ready."""
        return {each["id"]: each["epoch"] for each in self.records() if each["state"] == "ready"}

    def records(self) -> list[dict[str, Any]]:
        try:
            with self.service.client() as http:
                return [node["record"] for node in http.get("/nodes").raise_for_status().json()["nodes"]]
        except (httpx.HTTPError, ValueError, FileNotFoundError):
            return []

    def drain(self, node: str) -> None:
        self._admin(f"/nodes/{node}/drain")
        assert eventually(lambda: self._state(node) == "draining", 30), self.records()

    def undrain(self, node: str) -> None:
        self._admin(f"/nodes/{node}/undrain")
        assert eventually(lambda: self._state(node) == "ready", 30), self.records()

    def residents(self, node: str) -> list[dict[str, Any]]:
        with self.service.client() as http:
            found: list[dict[str, Any]] = http.get(f"/nodes/{node}/adapters").raise_for_status().json()["adapters"]
            return found

    # --- calls

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.service.url, headers=self.service.headers(TENANT), timeout=CALL_S)

    def deploy(self, name: str, directory: Path) -> dict[str, Any]:
        files = {file: (directory / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)}
        with self.client() as http:
            response = http.post(f"/deploy/{name}", files=files)
        assert response.status_code in (200, 201), response.text
        found: dict[str, Any] = response.json()
        return found

    def point(self, name: str, alias: str, version: int) -> None:
        with self.client() as http:
            http.put(f"/functions/{name}/aliases/{alias}", json={"version": version}).raise_for_status()

    def stream(self, name: str, **body: Any) -> Stream:
        return Stream(self, name, body)

    def logs(self) -> str:
        outputs = [f"== {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self.service.folder.glob("*.txt"))]
        return "\n".join([*outputs, self.service.logs()])

    # --- inside

    def _spawn(self, name: str, file: str, *arguments: str, tree: Path = ROOT) -> None:
        command = self.service.command(*arguments, "-f", FILES[file], *STATED)
        environment = os.environ | SETTINGS | {"PYTHONPATH": str(tree)}
        with (self.service.folder / f"{name}.txt").open("a") as output:
            process = subprocess.Popen(
                command, cwd=self.service.folder, env=environment, stdout=output, stderr=output, text=True
            )
        self._running[name] = process
        self._parts.callback(_end, process)

    def _are_new(self, nodes: tuple[str, ...], before: dict[str, str]) -> bool:
        for node in nodes:
            assert self._running[node].poll() is None, self.logs()
        now = self.epochs()
        return all(node in now and now[node] != before.get(node) for node in nodes)

    def _state(self, node: str) -> str:
        return next((str(each["state"]) for each in self.records() if each["id"] == node), "")

    def _admin(self, path: str) -> None:
        with self.service.client() as http:
            http.post(path).raise_for_status()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(STOP_S)


class Callers:
    """Context in which threads call functions again and again, and note what differs from what is expected."""

    def __init__(self, pool: MixedPool, calls: dict[str, tuple[dict[str, Any], Callable[[Reply], bool]]]) -> None:
        """`calls`: by function, the body of its calls, and whether a reply is right."""
        self._pool, self._stop = pool, threading.Event()
        self.right, self.nodes, self.wrong = 0, set[str](), list[Reply]()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call, args=(name, *call)) for name, call in calls.items()]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(CALL_S)

    def go_on(self, count: int) -> None:
        """Waits for further right replies."""
        before = self.right
        assert eventually(lambda: self.right >= before + count or bool(self.wrong), CALL_S), self._pool.logs()
        assert not self.wrong, (self.wrong, self._pool.logs())

    def _call(self, name: str, body: dict[str, Any], is_right: Callable[[Reply], bool]) -> None:
        while not self._stop.is_set():
            stream = self._pool.stream(name, **body)
            stream.join(CALL_S)
            with self._lock:
                if "timing" in stream.reply.last and is_right(stream.reply):
                    self.right += 1
                    self.nodes.add(stream.reply.node)
                else:
                    self.wrong.append(stream.reply)
