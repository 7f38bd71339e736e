"""A gateway and a node as on two hosts: folders, state and secret files of their own, and a bucket between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from whole_service import Service, descendants, eventually, is_alive, pin_to_one_core

from tests.support.s3_proxy import Proxy

START_SECONDS = 120
SECRET = "cluster.secret"
NODE = "gpu-1"


@dataclass
class TwoHosts:
    """Each host reaches the bucket through a proxy of its own, which tells what it asked for."""

    gateway: Service
    node_folder: Path
    gateway_store: Proxy
    node_store: Proxy
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start both, and wait until the gateway answers."""
        self._spawn(self.gateway.folder, self.gateway_store, "gateway", "--port", str(self.gateway.port), one_core=True)
        assert eventually((self.gateway.folder / SECRET).exists, START_SECONDS), self.output()
        shutil.copy(self.gateway.folder / SECRET, self.node_folder / SECRET)  # as an operator does it
        self._spawn(
            self.node_folder, self.node_store, "node", "--gateway", self.gateway.url, "--node-id", NODE,
            "--secret-file", SECRET,
        )  # fmt: skip
        assert eventually(lambda: self._status("/healthz") == 200, START_SECONDS), self.output()

    def wait_until_ready(self) -> None:
        """Until calls are served, by the very processes that were started."""
        assert eventually(lambda: self._status("/readyz") == 200, START_SECONDS), self.output()
        assert [process.poll() for process in self._running] == [None, None], self.output()

    def kill(self) -> dict[int, str]:
        """Kill -9 all processes of both; returns their command lines."""
        found: dict[int, str] = {}
        for process in self._running:
            found |= descendants(process.pid)
        for pid in found:  # parents come first, so that none of them starts a child again
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._running:
            process.wait()
        self._running.clear()
        assert eventually(lambda: not any(is_alive(pid, command) for pid, command in found.items())), found
        return found

    def output(self) -> str:
        """The end of what both have written."""
        files = [folder / "output.txt" for folder in (self.gateway.folder, self.node_folder)]
        return "\n".join(f"== {file}\n{file.read_text()[-4000:]}" for file in files if file.exists())

    def _spawn(self, folder: Path, store: Proxy, *arguments: str, one_core: bool = False) -> None:
        command = self.gateway.command(*arguments, "--state", "state")
        with (folder / "output.txt").open("a") as output:
            process = subprocess.Popen(
                pin_to_one_core(command) if one_core else command,
                cwd=folder,
                stdout=output,
                stderr=output,
                env={**os.environ, "AWS_ENDPOINT_URL_S3": store.url},
            )
        self._running.append(process)

    def _status(self, path: str) -> int:
        try:
            return httpx.get(f"{self.gateway.url}{path}", timeout=10).status_code
        except httpx.TransportError:
            return 0


def two_hosts(gateway: Service, node_folder: Path, gateway_store: Proxy, node_store: Proxy) -> TwoHosts:
    """Not started yet. The node has CPU workers where there is a core for one."""
    written = json.loads((gateway.folder / "serverless.yml").read_text())
    written["gateway"] = {"secret_file": SECRET}
    written["node"]["cpu_workers"] = min(1, len(os.sched_getaffinity(0)) - 1)
    for folder in (gateway.folder, node_folder):
        (folder / "serverless.yml").write_text(json.dumps(written))
    return TwoHosts(gateway, node_folder, gateway_store, node_store)
