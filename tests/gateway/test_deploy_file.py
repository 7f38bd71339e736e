"""`garnish deploy -f`: the plan says what will be done, doing it twice does nothing, and nobody is surprised."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_gateway import Running
from served_app import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


class Folder:
    """A service file whose functions a running gateway is to hold."""

    def __init__(self, root: Path, url: str, key: str) -> None:
        self.root = root
        self._environment = {**os.environ, "GARNISH_URL": url, "GARNISH_API_KEY": key, "XDG_CONFIG_HOME": str(root)}

    def write(self, **functions: dict[str, str]) -> None:
        content = {"service": "s", "base_model": "./base", "tenants": {"acme": {}}, "functions": functions}
        (self.root / "serverless.yml").write_text(json.dumps(content))

    def run(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "garnish.cli.main", "deploy", "-f", "serverless.yml", *arguments]
        return subprocess.run(
            command, cwd=self.root, env=self._environment, input=answer, capture_output=True, text=True, timeout=60
        )

    def deploy(self) -> dict[str, Any]:
        done = self.run("--yes", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def folder(gateway: Running, tmp_path: Path, stories_adapters: dict[str, Path]) -> Folder:
    for name in ("pirate", "dragon"):
        shutil.copytree(stories_adapters[name], tmp_path / "files" / name)
    return Folder(tmp_path / "files", gateway.url, gateway.keys["acme"])


def actions(done: dict[str, Any]) -> dict[str, str]:
    return {step["function"]: step["action"] for step in done["plan"]["functions"]}


def test_create_then_nothing_then_move(folder: Folder, gateway: Running) -> None:
    folder.write(f={"adapter": "./pirate", "alias": "prod"}, g={"adapter": "./dragon"})
    assert actions(folder.deploy()) == {"f": "create", "g": "create"}
    again = folder.deploy()
    assert (actions(again), again["deployed"]) == ({"f": "none", "g": "none"}, [])

    folder.write(f={"adapter": "./dragon", "alias": "prod"}, g={"adapter": "./dragon"})
    assert actions(folder.deploy()) == {"f": "create", "g": "none"}
    folder.write(f={"adapter": "./pirate", "alias": "prod"})
    back = folder.deploy()
    (step,) = back["plan"]["functions"]
    assert (step["action"], step["version"], step["points_to"]) == ("move", 1, 2)
    assert [entry["version"] for entry in back["deployed"]] == [1]
    client = gateway.client()
    assert client.get("/functions/f").json()["aliases"]["prod"] == 1
    assert client.get("/functions/g").status_code == 200, "what is no longer declared is left alone"


def test_nothing_is_done_before_yes(folder: Folder, gateway: Running) -> None:
    folder.write(f={"adapter": "./pirate"})
    for arguments, code in (((), 1), (("--json",), 1), (("--dry-run",), 0)):
        done = folder.run(*arguments, answer="y\n")
        assert done.returncode == code
        if not code:
            assert done.stdout == "function acme/f: create a version, and move latest to it (from nothing)\n"
        else:
            assert "--yes" in done.stderr
        assert gateway.client().get("/functions").json()["functions"] == []
    folder.deploy()
    assert folder.run().returncode == 0, "there is nothing to ask"


def test_an_adapter_that_is_not_there(folder: Folder) -> None:
    folder.write(f={"adapter": "./pirate"}, g={"adapter": "./nowhere"})
    done = folder.run("--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nowhere: expected a PEFT adapter's" in done.stderr


@pytest.fixture
def tenants() -> Iterator[tuple[str, dict[str, Any]]]:
    """What API.md says of tenants that exist and that do not, over a dict."""
    known: dict[str, Any] = {"acme": {}, "initech": {}}

    async def tenant(request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if request.method == "PUT":
            known[name] = await request.json()
            return JSONResponse({"id": name}, 201)
        return JSONResponse({"limits": {}, "slo": {}, "weight": 1.0, "declared": name == "initech", **known[name]})

    async def functions(request: Request) -> JSONResponse:
        if request.headers["x-garnish-tenant"] in known:
            return JSONResponse({"functions": [], "next": None})
        content = {"type": "not_found", "message": "there is no such tenant", "param": None, "request_id": "r"}
        return JSONResponse({"error": content}, 404)

    routes = [Route("/tenants/{name}", tenant, methods=["GET", "PUT"]), Route("/functions", functions)]
    with served(Starlette(routes=routes)) as url:
        yield url, known


def test_an_administrator_makes_and_changes_tenants(tenants: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, known = tenants
    folder = Folder(tmp_path, url, f"gak_{'0' * 12}_{'0' * 64}")
    file = tmp_path / "serverless.yml"
    file.write_text("service: s\nbase_model: b\ntenants: {acme: {}, globex: {weight: 2}, initech: {weight: 3}}\n")
    later = "tenant initech: is taken from the gateway's own serverless.yml at its next start\n"
    assert folder.run("--dry-run").stdout == "tenant acme: nothing to do\ntenant globex: create\n" + later
    folder.deploy()
    assert known == {"acme": {}, "globex": {"weight": 2}, "initech": {}}
    assert [step["action"] for step in folder.deploy()["plan"]["tenants"]] == ["none", "none", "later"]
    file.write_text("service: s\nbase_model: b\ntenants: {globex: {slo: {ttft_ms: 500, class: strict}}}\n")
    assert folder.run("--dry-run").stdout == "tenant globex: change slo\n"
    folder.deploy()
    slo = {"ttft_ms": 500, "tpot_ms": None, "attain": 0.99, "class": "strict"}
    assert known["globex"] == {"limits": {}, "slo": slo, "weight": 2}
    assert [step["action"] for step in folder.deploy()["plan"]["tenants"]] == ["none"]
