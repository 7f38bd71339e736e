"""Two real nodes are restarted one after the other under load: no call fails, and no stream breaks off."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from whole_service import MakeService, Service, eventually, pin_to_one_core

CALLERS = 2
TOKENS = 60
PAUSE = 0.1
"""Seconds after each stream: the node that starts needs the core more."""


@contextmanager
def process(service: Service, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Killed in the end; output goes to a file of its name."""
    with (service.folder / f"{name}.txt").open("a") as output:
        command = pin_to_one_core(service.command(*arguments, "--state", "state"))
        child = subprocess.Popen(command, cwd=service.folder, stdout=output, stderr=output, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def ready_nodes(service: Service) -> set[str]:
    try:
        with service.client() as http:
            nodes = http.get("/nodes").json()["nodes"]
    except httpx.TransportError:
        return set()
    return {node["record"]["id"] for node in nodes if node["record"]["state"] == "ready"}


class Callers:
    """Stream again and again, and note how each stream ended."""

    def __init__(self, service: Service) -> None:
        self._service, self._stop = service, threading.Event()
        self.ends: list[str] = []
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _call(self) -> None:
        body = {"prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        with self._service.client("acme") as http:
            while not self._stop.is_set():
                with http.stream("POST", "/invoke/dragon", json=body) as reply:
                    lines = [line for line in reply.iter_lines() if line.startswith("event: ")]
                tokens = lines.count("event: token")
                whole = reply.status_code == 200 and tokens >= TOKENS and lines[-1:] == ["event: done"]
                self.ends.append("done" if whole else f"{reply.status_code}: {tokens} tokens, {lines[-1:]}")
                time.sleep(PAUSE)


def test_rolling_restart(make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]) -> None:
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared)

    def node(name: str) -> tuple[str, ...]:
        return (name, "node", "--gateway", service.url, "--node-id", name)

    with ExitStack() as processes:
        processes.enter_context(process(service, "gateway", "gateway", "--port", str(service.port)))
        assert eventually(
            lambda: all((service.state / name).exists() for name in ("cluster.secret", "credentials.toml")), 60
        )
        first, second = [processes.enter_context(process(service, *node(name))) for name in ("a", "b")]
        assert eventually(lambda: ready_nodes(service) == {"a", "b"}, 150), service.logs()
        deployed = service.run("deploy", "-f", "serverless.yml", "--state", "state", "--yes", "--json")
        assert deployed.returncode == 0, deployed.stderr
        assert json.loads(deployed.stdout)["plan"]["functions"][0]["action"] == "create"
        with Callers(service) as callers:
            first.send_signal(signal.SIGTERM)
            assert first.wait(60) == 0
            processes.enter_context(process(service, *node("a")))
            assert eventually(lambda: "a" in ready_nodes(service), 90)
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 0
            before = len(callers.ends)
            assert eventually(lambda: len(callers.ends) >= before + CALLERS, 60), "the first one serves alone"
    assert len(callers.ends) > 2 * CALLERS
    assert set(callers.ends) == {"done"}
