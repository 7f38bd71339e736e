"""`garnish up` as a real process over a real model, and what tests need to look at it from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from infra.processes import tagged
from tests.support.processes import processes, tree

START_SECONDS = 200
STOP_SECONDS = 60
FIRST_POLL_S, MAX_POLL_S = 0.02, 0.2
"""Between two looks, longer each time: a look takes of the core on which a service starts."""


@dataclass
class Service:
    """A service file in a folder of its own, and the process that serves it."""

    folder: Path
    port: int
    process: subprocess.Popen[str] | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    """What `garnish up --json` printed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def credentials(self) -> dict[str, Any]:
        return tomllib.loads((self.state / "credentials.toml").read_text())

    def headers(self, tenant: str | None = None) -> dict[str, str]:
        """Of a tenant's key, or (None) of the admin's."""
        known = self.credentials
        return {"authorization": f"Bearer {known['keys'][tenant] if tenant else known['admin_key']}"}

    def client(self, tenant: str | None = None) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers(tenant), timeout=120, verify=False)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "garnish.cli.main", *arguments]

    def run(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """A command of the command line, in the service's folder."""
        return subprocess.run(
            self.command(*arguments), cwd=self.folder, input=text, capture_output=True, text=True, timeout=200
        )

    def spawn(self, *arguments: str) -> subprocess.Popen[str]:
        """Start without waiting."""
        command = self.command("up", "--port", str(self.port), "--state", "state", *arguments)
        with (self.folder / "err.txt").open("w") as problems:
            self.process = subprocess.Popen(
                pin_to_one_core(command), cwd=self.folder, stdout=subprocess.PIPE, stderr=problems, text=True
            )
        return self.process

    def start(self, *arguments: str) -> Service:
        """Start and wait until it is ready."""
        process = self.spawn("--json", *arguments)
        assert process.stdout is not None
        killer = threading.Timer(START_SECONDS, process.kill)
        killer.start()
        line = process.stdout.readline()
        killer.cancel()
        assert line, f"garnish up did not get ready: {(self.folder / 'err.txt').read_text()}\n{self.logs()}"
        self.ready = json.loads(line)
        return self

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ask to stop, and wait; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.state.glob("logs/*.log")))

    def processes(self) -> dict[int, str]:
        """Process ids and command lines of the whole tree below `garnish up`, itself included."""
        assert self.process is not None
        return descendants(self.process.pid)

    def pid_of(self, module: str) -> int:
        return next(pid for pid, command in self.processes().items() if module in command)

    def node(self) -> dict[str, Any]:
        """The record of the only node."""
        with self.client() as http:
            nodes = http.get("/nodes").raise_for_status().json()["nodes"]
        assert len(nodes) == 1, nodes
        return {**nodes[0]["record"], "reserved": nodes[0]["reserved"]}

    def nothing_held(self) -> bool:
        """Whether no request, KV block, lease or reservation is left."""
        record = self.node()
        leases = sum(entry["in_use"] for entry in record.get("residents", []))
        blocks = record["kv_blocks"] - record["kv_blocks_free"]
        return (record["running"], record["queued"], record["reserved"], leases, blocks) == (0, 0, 0, 0, 0)


MakeService = Callable[..., Service]


def service_file(
    model: Path, functions: dict[str, Any], tenants: tuple[str, ...], dtype: str, registry: str | None = None
) -> str:
    """JSON is YAML, too."""
    return json.dumps(
        {
            "service": "e2e",
            "base_model": str(model),
            "registry": registry,
            "node": {
                "device": "cpu",
                "dtype": dtype,
                "adapter_memory": "64MiB",
                "host_memory": "64MiB",
                "kv_memory": "64MiB",
            },
            "tenants": {name: {} for name in tenants},
            "functions": functions,
        },
        indent=1,
    )


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition holds within the time."""
    deadline, pause = time.monotonic() + seconds, FIRST_POLL_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(MAX_POLL_S, pause * 1.2)
    return True


def pin_to_one_core(command: list[str]) -> list[str]:
    """On a busy machine the threads of an engine this small would mostly wait for each other.

    Processes of tests (pytest-xdist's workers, which number themselves) go from the last core downwards, in turn.
    """
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return ["taskset", "-c", str(cores[number % len(cores)]), *command]


@contextmanager
def gateway_alone(service: Service) -> Iterator[None]:
    """Its gateway, without nodes. In the end all that carries the service's tag is killed."""
    command = pin_to_one_core(service.command("gateway", "--state", "state"))
    with (service.folder / "gateway.txt").open("w") as output:
        gateway = subprocess.Popen(command, cwd=service.folder, stdout=output, stderr=output)
    try:
        yield
    finally:
        for _, process in tagged(str(service.state.absolute()), ""):
            os.kill(process.pid, signal.SIGKILL)
        gateway.terminate()
        gateway.wait(30)


def can_listen(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def descendants(root: int) -> dict[int, str]:
    """Living processes (zombies are not) of the tree below `root`, itself included."""
    known = {pid: found for pid, found in processes().items() if found[1] != "Z"}
    return {pid: command_line(pid) for pid in tree(root, known)}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_alive(pid: int, command: str) -> bool:
    """Whether this very process still runs (a reused process id is another one)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and command_line(pid) == command
