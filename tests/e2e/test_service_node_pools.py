"""Node pools on this host, offline: plan, apply, calls, 1 -> 3 -> 1, a killed node replaced, all of it destroyed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_service import MakeService, Service, eventually, gateway_alone

from infra.processes import NodeKey, main_process, tagged
from tests.infra.stacks import needs_terraform

pytestmark = needs_terraform
READY_SECONDS = 120
OFFLINE = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
"""Whatever would be fetched from elsewhere can't be."""
GREEDY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


class Pools:
    """A gateway that runs, and the commands of its service file's node pools."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.state = str(service.state.absolute())
        self._written = json.loads((service.folder / "serverless.yml").read_text())
        self._written["service"] = "pools"
        self._written["gateway"] = {"port": service.port}
        self.told = ""
        self.desire(1)

    def desire(self, count: int) -> None:
        self._written["node_pools"] = {"here": {"backend": "local", "min": 0, "desired": count, "max": 3}}
        (self.service.folder / "serverless.yml").write_text(json.dumps(self._written))

    def infra(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        command = self.service.command("infra", *arguments, "--state", "state", "--json")
        done = subprocess.run(
            command, cwd=self.service.folder, env=OFFLINE, capture_output=True, text=True, timeout=150
        )
        self.told += done.stdout + done.stderr
        assert done.returncode == code, done.stdout + done.stderr + self.service.logs()
        result: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
        return result

    def apply(self, *expected: tuple[str, str]) -> None:
        """Plan, and carry out just what is expected."""
        planned = self.infra("plan", "--detailed-exitcode", code=2 if expected else 0)
        told_no_secret(self)
        assert [(change["action"], change["resource"]) for change in planned["changes"]] == list(expected)
        if expected:
            assert self.infra("apply", "--yes")["changes"] == planned["changes"]

    def pids(self) -> dict[str, int]:
        """The supervisor of each node that lives."""
        tags = {tag for tag, _ in tagged(self.state, "pools/")}
        keys = [NodeKey(state=self.state, service="pools", pool="here", node=tag.split("/")[2]) for tag in tags]
        return {key.node: main.pid for key in keys if (main := main_process(key)) is not None}

    def ready(self) -> set[str]:
        with self.service.client() as http:
            nodes = http.get("/nodes").raise_for_status().json()["nodes"]
        return {node["record"]["id"] for node in nodes if node["record"]["state"] == "ready"}

    def served_by(self, calls: int) -> set[str]:
        """The nodes that answered so many calls, all of which are answered."""
        with self.service.client("acme") as http:
            replies = [
                http.post(f"/invoke/{self._written['base_model'].rpartition('/')[2]}", json=GREEDY)
                for _ in range(calls)
            ]
        assert [reply.status_code for reply in replies] == [200] * calls, [reply.text for reply in replies]
        return {reply.headers["x-garnish-node"] for reply in replies}


@pytest.fixture
def pools(make_service: MakeService, stories_dir: Path) -> Iterator[Pools]:
    service = make_service(stories_dir)
    made = Pools(service)
    with gateway_alone(service):
        yield made


def test_the_life_of_a_pool(pools: Pools) -> None:
    assert eventually((pools.service.state / "credentials.toml").exists, 60)
    pools.apply(("create", "here-1"))
    assert eventually(lambda: pools.ready() == {"here-1"}, READY_SECONDS), pools.service.logs()
    assert pools.served_by(2) == {"here-1"}
    pools.apply()
    first = pools.pids()

    pools.desire(3)
    refused = pools.infra("apply", "--yes", code=1)
    assert "made for another serverless.yml" in refused["error"]
    pools.apply(("create", "here-2"), ("create", "here-3"))
    assert pools.pids()["here-1"] == first["here-1"], "the node that was there goes on"

    killed = pools.pids()["here-2"]
    os.kill(killed, signal.SIGKILL)
    assert eventually(lambda: "here-2" not in pools.pids())
    (shown,) = pools.infra("show")["pools"]
    assert (shown["nodes"]["here-2"], shown["drift"]) == ("dead", ["here-2 has died"])
    pools.apply(("replace", "here-2"))
    assert pools.pids()["here-2"] != killed
    assert eventually(lambda: pools.ready() == {"here-1", "here-2", "here-3"}, READY_SECONDS), pools.service.logs()
    assert pools.served_by(6) <= pools.ready()

    (pools.service.state / "infra" / "pools" / "nodes" / "here-3.json").unlink()  # a lost pid file loses no process
    pools.desire(1)
    pools.apply(("destroy", "here-2"), ("destroy", "here-3"))
    assert pools.pids() == first
    assert pools.served_by(2) == {"here-1"}

    pools.infra("destroy", "--yes")
    assert list(tagged(pools.state, "")) == []
    state = json.loads((pools.service.state / "infra" / "pools" / "terraform.tfstate").read_text())
    assert state["resources"] == []
    assert pools.infra("show")["pools"][0]["drift"] == ["not applied yet"]
    told_no_secret(pools)


def told_no_secret(pools: Pools) -> None:
    """Neither output nor plan, state, logs or what is rendered holds the cluster secret or a key."""
    known = pools.service.credentials
    secrets = [
        (pools.service.state / "cluster.secret").read_text().strip(),
        known["admin_key"],
        *known["keys"].values(),
    ]
    files = [*(pools.service.state / "infra").rglob("*"), *(pools.service.state / "logs").rglob("*")]
    texts = [pools.told.encode(), *(text for file in files if file.is_file() for text in texts_of(file))]
    assert pools.told and not [secret for secret in secrets for text in texts if secret.encode() in text]


def texts_of(file: Path) -> list[bytes]:
    """What it holds; a plan is a zip."""
    if file.suffix != ".tfplan":
        return [file.read_bytes()]
    with zipfile.ZipFile(file) as plan:
        return [plan.read(name) for name in plan.namelist()]
