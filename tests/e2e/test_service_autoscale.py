"""`garnish autoscale` over real nodes of a local pool: none -> 1 for a held call, 1 -> 3 under load and back to none,
and two autoscalers of which one decides."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from whole_service import MakeService, Service, eventually, gateway_alone

from infra.processes import tagged
from tests.infra.stacks import needs_terraform

pytestmark = needs_terraform
READY_SECONDS = 120
SCALING = {"up": "5s", "down": "3s", "queue_wait": "250ms"}
CALL = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
CALLERS = 64
"""At once: a node computes 32 rows, of which 0.7 count as full."""


class Scaled:
    """A gateway that runs, and a pool of 0 to 3 nodes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.state = str(service.state.absolute())
        self.written = json.loads((service.folder / "serverless.yml").read_text())
        self.written |= {"service": "scaled", "gateway": {"port": service.port, "hold": "2m"}}
        pool = {"backend": "local", "min": 0, "desired": 0, "max": 3, "scale_to_zero_after": "1s", "scaling": SCALING}
        self.written["node_pools"] = {"here": pool}
        (service.folder / "serverless.yml").write_text(json.dumps(self.written))

    def run(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        command = self.service.command(*arguments, "--state", "state", "--json")
        done = subprocess.run(command, cwd=self.service.folder, capture_output=True, text=True, timeout=150)
        assert done.returncode == code, done.stdout + done.stderr + self.service.logs()
        result: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return result

    @contextmanager
    def autoscaler(self) -> Iterator[Autoscaler]:
        command = self.service.command("autoscale", "--state", "state", "--json")
        process = subprocess.Popen(
            command, cwd=self.service.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            yield Autoscaler(process)
        finally:
            process.kill()
            process.communicate()

    def ready(self) -> set[str]:
        with self.service.client() as http:
            nodes = http.get("/nodes").raise_for_status().json()["nodes"]
        return {node["record"]["id"] for node in nodes if node["record"]["state"] == "ready"}

    def nodes(self) -> set[str]:
        """Whose processes live."""
        return {tag.split("/")[2] for tag, _ in tagged(self.state, "scaled/")}

    def sized(self, count: int) -> bool:
        return eventually(lambda: len(self.ready()) == len(self.nodes()) == count, READY_SECONDS)

    def call_until(self, enough: threading.Event) -> list[int]:
        """The statuses of one call after another; of one at least."""
        statuses = []
        with self.service.client("acme") as http:
            while not statuses or not enough.is_set():
                statuses.append(http.post("/invoke/stories260K", json=CALL, timeout=120).status_code)
        return statuses

    def call(self) -> int:
        enough = threading.Event()
        enough.set()
        return self.call_until(enough)[0]


class Autoscaler:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.decided: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.decided.append(json.loads(line))

    def moves(self) -> list[tuple[int, int]]:
        return [(entry["size"], entry["wanted"]) for entry in self.decided if entry["action"] == "set"]

    def acts(self) -> list[dict[str, Any]]:
        """What it did, and what it was kept from doing: an idle pool's rounds do neither."""
        return [entry for entry in self.decided if entry["action"] != "none"]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0


@pytest.fixture
def scaled(make_service: MakeService, stories_dir: Path) -> Iterator[Scaled]:
    service = make_service(stories_dir)
    made = Scaled(service)
    with gateway_alone(service):
        assert eventually((service.state / "credentials.toml").exists, 60)
        yield made


@pytest.fixture
def applied(scaled: Scaled) -> Scaled:
    """Its pool is there, and empty."""
    scaled.run("infra", "plan")
    scaled.run("infra", "apply", "--yes")
    return scaled


def test_from_none_to_one_for_a_call_that_waits_and_back(applied: Scaled) -> None:
    assert applied.call() == 503, "nobody would start a node"
    with applied.autoscaler() as first:
        assert eventually(lambda: bool(first.decided), 60)
        with applied.autoscaler() as second:
            assert eventually(lambda: bool(second.decided), 60)
            assert applied.call() == 200, (first.decided[-5:], applied.service.logs())
            assert applied.sized(0), first.decided[-5:]
            assert eventually(lambda: first.moves() == [(0, 1), (1, 0)], 60), first.acts()
            assert {entry["action"] for entry in second.decided} == {"held"}
            assert "leads" in second.decided[-1]["reason"]
            first.end()
            assert eventually(lambda: second.decided[-1]["action"] == "none", 60)
            second.end()


@pytest.mark.slow
def test_from_none_to_three_and_back_without_a_lost_request(applied: Scaled) -> None:
    with applied.autoscaler() as scaler:
        assert eventually(lambda: bool(scaler.decided), 60)
        _load_step(applied, scaler)
        assert applied.sized(0), scaler.decided[-5:]
        assert scaler.moves()[0] == (0, 1)
        assert max(size for _, size in scaler.moves()) == 3
        scaler.end()


def _load_step(scaled: Scaled, scaler: Autoscaler) -> None:
    enough = threading.Event()
    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(scaled.call_until, enough) for _ in range(CALLERS)]
        try:
            assert scaled.sized(3), (scaler.decided[-5:], scaled.service.logs())
            planned = scaled.run("infra", "plan")
        finally:
            enough.set()
        statuses = {status for call in calls for status in call.result(120)}
    assert statuses == {200}, "no request was lost, neither while nodes came nor while they went"
    assert planned["changes"] == [], "the plan holds to what the autoscaler did"
    assert "has set 3, serverless.yml says 0" in planned["sizes"][0]
