"""A service goes from one build to another of the same protocol version and back, part by part, under calls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from whole_service import MakeService, Service, eventually, pin_to_one_core

ROOT = Path(__file__).parents[2]
PACKAGES = ("adapters", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")
LAST_FIELD = (
    "    vllm: VllmLoad | None = None\n"
    '    """vLLM\'s own figures. None: the node\'s engine is another one, or is not ready."""\n'
)
"""End of a message that is an array, in which new fields come last."""
NEW_FIELDS = {
    "cluster/news.py": (LAST_FIELD, f"{LAST_FIELD}    later: int = 7\n"),
    "adapters/functions.py": ("    deleted: bool = False\n", "    deleted: bool = False\n    later: int = 7\n"),
}
"""Fields of a message and of a stored record that only the other build knows."""
BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
PAUSE = 0.1
"""Seconds after each answer: starting nodes need the core more."""
STATED = ("--state", "state")


@pytest.fixture(scope="session")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other_build")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in NEW_FIELDS.items():
        text = (folder / name).read_text()
        assert text.count(before) == 1, name
        (folder / name).write_text(text.replace(before, after))
    return folder


class Builds:
    """Runs a service's parts from one build or the other."""

    def __init__(self, service: Service, other: Path) -> None:
        self.service, self.trees = service, {"this": ROOT, "other": other}
        self._parts = ExitStack()
        self._running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def run(self, build: str, *arguments: str) -> str:
        done = subprocess.run(
            self.service.command(*arguments), cwd=self.service.folder, env=self._environment(build),
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def replace(self, name: str, build: str) -> None:
        """Stop the part, if it runs, as an operator does, and start it from the build."""
        if name in self._running:
            self._running[name].send_signal(signal.SIGTERM)
            assert self._running[name].wait(90) == 0, self.service.logs()
        node = ("node", "--gateway", self.service.url, "--node-id", name)
        arguments = ("gateway", "--port", str(self.service.port)) if name == "gateway" else node
        self._running[name] = self._parts.enter_context(self._part(name, build, arguments))

    @contextmanager
    def _part(self, name: str, build: str, arguments: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
        with (self.service.folder / f"{name}.txt").open("a") as output:
            command = pin_to_one_core(self.service.command(*arguments, *STATED))
            part = subprocess.Popen(
                command,
                cwd=self.service.folder,
                env=self._environment(build),
                stdout=output,
                stderr=output,
                text=True,
            )
        try:
            yield part
        finally:
            part.kill()
            part.wait()

    def _environment(self, build: str) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.trees[build])}

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

    def replace_node(self, name: str, build: str) -> None:
        before = frozenset(self.epochs().values())
        self.replace(name, build)
        assert eventually(lambda: self.ready(name, anew=before), 150), self.service.logs()

    def replace_gateway(self, build: str) -> None:
        self.replace("gateway", build)
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
    make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path], other_build: Path
) -> None:
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared)
    with Builds(service, other_build) as builds:
        builds.replace("gateway", "this")
        files = ("cluster.secret", "credentials.toml")
        assert eventually(lambda: all((service.state / name).exists() for name in files), 60), service.logs()
        for name in ("a", "b"):
            builds.replace(name, "this")
        assert eventually(lambda: builds.ready("a", "b"), 200), service.logs()
        builds.run("this", "deploy", "-f", "serverless.yml", *STATED, "--yes", "--json")
        with service.client("acme") as http:
            first = http.post("/invoke/dragon", json=BODY)
        assert first.status_code == 200, first.text
        with Caller(service, text_of(first)) as caller:
            caller.goes_on()
            builds.replace_gateway("other")  # a gateway first, with nodes that report less
            caller.goes_on()
            for name in ("a", "b"):
                builds.replace_node(name, "other")
                caller.goes_on()
            again = json.loads(builds.run("other", "deploy", "-f", "serverless.yml", *STATED, "--yes", "--json"))
            assert [entry["action"] for entry in again["plan"]["functions"]] == ["none"], again
            second = str(stories_adapters["ocean"])
            builds.run("other", "deploy", "dragon", second, *STATED, "--tenant", "acme", "--json")
            with service.client("acme") as http:
                newest = http.post("/invoke/dragon:2", json=BODY)
                assert newest.status_code == 200, newest.text
            builds.replace_gateway("this")  # and back: a gateway first, with nodes that report more
            caller.goes_on()
            for name in ("a", "b"):
                builds.replace_node(name, "this")
                caller.goes_on()
            with service.client("acme") as http:
                assert http.put("/functions/dragon/aliases/prod", json={"version": 1}).status_code == 200
                assert text_of(http.post("/invoke/dragon:2", json=BODY)) == text_of(newest)
                versions = http.get("/functions/dragon/versions").json()["versions"]
                assert {entry["version"] for entry in versions} == {1, 2}
                usage = http.get("/usage").json()
                assert usage["total"]["requests"] >= caller.done, usage
        assert not caller.wrong and caller.done
    (record,) = service.folder.rglob("function.json")
    assert json.loads(record.read_bytes())["later"] == 7, "what this build does not know survived its change"
