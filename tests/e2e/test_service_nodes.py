"""Operators and versions while adapters load, and a killed node: two behind one gateway, each with a slow simulated
store."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from whole_service import MakeService, Service, eventually

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE

GREEDY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
STORE = 80_000
"""Bytes per second: a load takes seconds."""


@pytest.fixture(scope="module")
def pair(make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]) -> Service:
    service = make_service(stories_dir, {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}})
    file = service.folder / "serverless.yml"
    written = json.loads(file.read_text())
    written["node"] |= {"simulate": {"store": f"{STORE}B/s"}, "prefetch": "off"}  # what is where, these tests say
    file.write_text(json.dumps(written))
    return service.start("--nodes", "2")


def told(service: Service, *arguments: str) -> Any:
    """What `garnish nodes ... --json` prints."""
    done = service.run("nodes", *arguments, "--state", "state", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def adapters(service: Service, node: str) -> list[dict[str, Any]]:
    with service.client() as http:
        found = http.get(f"/nodes/{node}/adapters").raise_for_status().json()["adapters"]
        assert isinstance(found, list)
        return found


def deploy(service: Service, name: str, directory: Path) -> str:
    files = {file: (directory / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)}
    with service.client("acme") as http:
        return str(http.post(f"/deploy/{name}", files=files).raise_for_status().json()["digest"])


class Call(threading.Thread):
    """A call of acme in the background."""

    def __init__(self, service: Service, name: str) -> None:
        super().__init__(daemon=True)
        self._service, self._name = service, name
        self.status, self.reply = 0, {}
        self.start()

    def run(self) -> None:
        with self._service.client("acme") as http:
            response = http.post(f"/invoke/{self._name}", json=GREEDY)
            self.status, self.reply = response.status_code, response.json()

    def result(self) -> dict[str, Any]:
        self.join(60)
        assert self.status == 200, self.reply
        return self.reply


def is_loading(service: Service, digest: str) -> bool:
    found = [entry for node in ("node-1", "node-2") for entry in adapters(service, node)]
    return any(entry["layers"] for entry in found if entry["digest"] == digest)


def test_an_operator_moves_adapters_and_drains_nodes(pair: Service) -> None:
    names = [entry["record"]["id"] for entry in told(pair)["nodes"]]
    first, second = names
    moved = told(pair, "prefetch", first, "dragon", "--tenant", "acme")
    assert (moved["node"], moved["tier"]) in ((first, "device"), (first, None))
    digest = moved["digest"]
    assert eventually(lambda: [(a["digest"], a["tier"]) for a in adapters(pair, first)] == [(digest, "device")], 60)
    assert adapters(pair, second) == []

    assert told(pair, "drain", second)["record"]["state"] == "draining"
    with pair.client("acme") as http:
        replies = [http.post("/invoke/dragon", json=GREEDY) for _ in range(3)]
    assert [(r.status_code, r.headers["x-garnish-node"], r.headers["x-garnish-cold-start"]) for r in replies] == [
        (200, first, "none")
    ] * 3
    assert told(pair, "undrain", second)["record"]["state"] == "ready"

    assert told(pair, "evict", first, "--digest", digest)["tier"] == "absent"
    assert adapters(pair, first) == []
    done = pair.run("nodes", "evict", first, "dragon", "--tenant", "acme", "--state", "state")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not on this node" in done.stderr
    done = pair.run("nodes", "--state", "state", "--no-header")
    assert [line.split("\t")[:2] for line in done.stdout.splitlines()] == [[first, "ready"], [second, "ready"]]


def evict(service: Service, node: str, digest: str) -> None:
    def gone() -> bool:  # 409 while the end of a call still holds it
        with service.client() as http:
            return http.post(f"/nodes/{node}/evict", json={"digest": digest}).status_code in (200, 404)

    assert eventually(gone)


def test_a_call_keeps_its_version_whatever_becomes_of_the_function(
    pair: Service, stories_adapters: dict[str, Path]
) -> None:
    """Redeployed, and then deleted, while the adapter is loading."""
    expected = {}
    for name in ("space", "ocean"):
        deploy(pair, f"known-{name}", stories_adapters[name])
        reply = Call(pair, f"known-{name}").result()
        expected[name] = reply["output"]["text"], reply["digest"]
        for node in ("node-1", "node-2"):
            evict(pair, node, reply["digest"])
    assert expected["space"] != expected["ocean"]

    deploy(pair, "changing", stories_adapters["space"])
    first = Call(pair, "changing")
    assert eventually(lambda: is_loading(pair, expected["space"][1]))
    deploy(pair, "changing", stories_adapters["ocean"])
    second = Call(pair, "changing")
    assert eventually(lambda: is_loading(pair, expected["ocean"][1]))
    with pair.client("acme") as http:
        assert http.delete("/functions/changing").status_code == 204
        assert http.post("/invoke/changing", json=GREEDY).status_code == 404
    for call, version, name in ((first, 1, "space"), (second, 2, "ocean")):
        reply = call.result()
        assert (reply["version"], reply["output"]["text"], reply["digest"]) == (version, *expected[name])
        assert reply["timing"]["cold_start"]["state"] == "absent"


def test_a_killed_node_is_not_noticed(pair: Service) -> None:
    """While one is dead and comes back, every call is answered by the other."""
    with pair.client() as admin, pair.client("acme") as http:

        def ready() -> set[str]:
            nodes = admin.get("/nodes").json()["nodes"]
            return {node["record"]["id"] for node in nodes if node["record"]["state"] == "ready"}

        assert eventually(lambda: ready() == {"node-1", "node-2"}, 60)
        assert http.post("/invoke/dragon", json=GREEDY).status_code == 200
        os.kill(pair.pid_of("garnish.run_node"), signal.SIGKILL)
        replies = [http.post("/invoke/dragon", json=GREEDY) for _ in range(10)]
        assert [reply.status_code for reply in replies] == [200] * 10
        assert eventually(lambda: ready() == {"node-1", "node-2"}, 60)
    assert "ended with code -9" in (pair.folder / "err.txt").read_text()
    assert pair.stop() == 0
