"""A service goes from the release before to this one and back, in the order of docs/operate/upgrade.md, under calls."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from whole_service import MakeService, Service, eventually, pin_to_one_core

ROOT = Path(__file__).parents[2]
BEFORE = "95635b1"
"""Of the release before."""
BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
PAUSE = 0.1
"""Seconds after each answer: starting nodes need the core more."""
STATED = ("--state", "state")


@pytest.fixture(scope="session")
def release_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True)
    if packed.returncode:
        pytest.skip(f"the release before ({BEFORE}) is not in this clone: {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("release_before")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Releases:
    """Runs a service's parts from one release or the other."""

    def __init__(self, service: Service, before: Path) -> None:
        self.service, self.trees = service, {"old": before, "new": ROOT}
        self._parts = ExitStack()
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Releases:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def run(self, release: str, *arguments: str) -> str:
        done = subprocess.run(
            self.service.command(*arguments), cwd=self.service.folder, env=self._environment(release),
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def replace(self, name: str, release: str) -> None:
        """Stop the part, if it runs, as an operator does, and start it from the release."""
        if name in self._running:
            self._running[name].send_signal(signal.SIGTERM)
            assert self._running[name].wait(90) == 0, self.service.logs()
        node = ("node", "--gateway", self.service.url, "--node-id", name)
        arguments = ("gateway", "--port", str(self.service.port)) if name == "gateway" else node
        self._running[name] = self._parts.enter_context(self._part(name, release, arguments))

    @contextmanager
    def _part(self, name: str, release: str, arguments: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
        with (self.service.folder / f"{name}.txt").open("a") as output:
            command = pin_to_one_core(self.service.command(*arguments, *STATED))
            part = subprocess.Popen(
                command,
                cwd=self.service.folder,
                env=self._environment(release),
                stdout=output,
                stderr=output,
                text=True,
            )
        try:
            yield part
        finally:
            part.kill()
            part.wait()

    def _environment(self, release: str) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.trees[release])}

    def ready(self, *nodes: str, anew: frozenset[str] = frozenset()) -> bool:
        """These nodes, with epochs that are not among `anew`."""
        epochs = self.epochs()
        return all(name in epochs and epochs[name] not in anew for name in nodes)

    def epochs(self) -> dict[str, str]:
        try:
            with self.service.client() as http:
                found = http.get("/nodes").json().get("nodes", [])
        except (httpx.TransportError, ValueError):
            return {}
        return {node["record"]["id"]: node["record"]["epoch"] for node in found if node["record"]["state"] == "ready"}

    def replace_node(self, name: str, release: str) -> None:
        before = frozenset(self.epochs().values())
        self.replace(name, release)
        assert eventually(lambda: self.ready(name, anew=before), 150), self.service.logs()

    def replace_gateway(self, release: str) -> None:
        self.replace("gateway", release)
        assert eventually(lambda: self.ready("a", "b"), 90), self.service.logs()


class Caller:
    """Calls again and again, as clients do: what is refused for now, or can't be reached, is tried again."""

    def __init__(self, service: Service, text: str) -> None:
        self._service, self._text, self._stop = service, text, threading.Event()
        self.wrong: list[str] = []
        self.done = self.again = 0
        self._thread = threading.Thread(target=self._call)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(150)

    def _call(self) -> None:
        with self._service.client("acme") as http:
            while not self._stop.is_set():
                try:
                    reply = http.post("/invoke/dragon:1", json=BODY)
                except httpx.TransportError:
                    self.again += 1
                    time.sleep(0.1)
                    continue
                if reply.status_code in (429, 503) and "retry-after" in reply.headers:
                    self.again += 1
                    time.sleep(0.1)
                elif reply.status_code != 200 or text_of(reply) != self._text:
                    self.wrong.append(f"{reply.status_code}: {reply.text[:300]}")
                else:
                    self.done += 1
                    time.sleep(PAUSE)

    def goes_on(self) -> None:
        before = self.done
        assert eventually(lambda: self.done > before + 1, 60), self._service.logs()
        assert not self.wrong


def text_of(reply: httpx.Response) -> str:
    return str(reply.json()["output"]["text"] if "output" in reply.json() else reply.json()["text"])


@pytest.mark.slow
def test_there_and_back(
    make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path], release_before: Path
) -> None:
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared)
    with Releases(service, release_before) as releases:
        releases.replace("gateway", "old")
        files = ("cluster.secret", "credentials.toml")
        assert eventually(lambda: all((service.state / name).exists() for name in files), 60), service.logs()
        for name in ("a", "b"):
            releases.replace(name, "old")
        assert eventually(lambda: releases.ready("a", "b"), 200), service.logs()
        releases.run("old", "deploy", "-f", "serverless.yml", *STATED, "--yes", "--json")
        with service.client("acme") as http:
            first = http.post("/invoke/dragon", json=BODY)
        assert first.status_code == 200, first.text
        with Caller(service, text_of(first)) as caller:
            caller.goes_on()
            releases.replace_gateway("new")  # a gateway first: it understands old nodes
            caller.goes_on()
            for name in ("a", "b"):
                releases.replace_node(name, "new")
                caller.goes_on()
            again = json.loads(releases.run("new", "deploy", "-f", "serverless.yml", *STATED, "--yes", "--json"))
            assert [entry["action"] for entry in again["plan"]["functions"]] == ["none"], again
            second = str(stories_adapters["ocean"])
            releases.run("new", "deploy", "dragon", second, *STATED, "--tenant", "acme", "--json")
            with service.client("acme") as http:
                newest = http.post("/invoke/dragon:2", json=BODY)
                assert newest.status_code == 200, newest.text
            for name in ("a", "b"):  # and back: nodes first, for old gateways do not understand new ones
                releases.replace_node(name, "old")
                caller.goes_on()
            releases.replace_gateway("old")
            caller.goes_on()
            with service.client("acme") as http:
                assert text_of(http.post("/invoke/dragon:2", json=BODY)) == text_of(newest)
                versions = http.get("/functions/dragon/versions").json()["versions"]
                assert {entry["version"] for entry in versions} == {1, 2}
                usage = http.get("/usage").json()
                assert usage["total"]["requests"] >= caller.done, usage
        assert not caller.wrong and caller.done
