"""`garnish deploy -f`: the plan says what will be done, doing it twice does nothing, and nobody is surprised."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from running_gateway import Running
from served_app import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from garnish import AsyncClient
from gateway.routes.deploy import DeployReply
from tests.garnish.hub_server import running_hub


class Folder:
    """A service file whose functions a running gateway is to hold."""

    def __init__(self, command_line: CommandLine, root: Path, url: str, key: str) -> None:
        self.root, self._command_line = root, command_line
        self.environment = {**os.environ, "GARNISH_URL": url, "GARNISH_API_KEY": key, "XDG_CONFIG_HOME": str(root)}

    def write(self, **functions: dict[str, Any]) -> None:
        content = {"service": "s", "base_model": "./base", "tenants": {"acme": {}}, "functions": functions}
        (self.root / "serverless.yml").write_text(json.dumps(content))

    def run(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        return self.command("deploy", "-f", "serverless.yml", *arguments, answer=answer)

    def command(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        return self._command_line.run(*arguments, folder=self.root, environment=self.environment, answer=answer)

    def deploy(self) -> dict[str, Any]:
        done = self.run("--yes", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def folder(command_line: CommandLine, gateway: Running, tmp_path: Path, stories_adapters: dict[str, Path]) -> Folder:
    for name in ("pirate", "dragon"):
        shutil.copytree(stories_adapters[name], tmp_path / "files" / name)
    return Folder(command_line, tmp_path / "files", gateway.url, gateway.keys["acme"])


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


def test_policies_are_set_where_they_are_not_so(folder: Folder, gateway: Running) -> None:
    folder.write(f={"adapter": "./pirate", "timeout": "30s", "max_concurrency": 4}, g={"adapter": "./dragon"})
    assert actions(folder.deploy()) == {"f": "create", "g": "create"}
    client = gateway.client()
    assert client.get("/functions/f").json()["policy"] == {"timeout": 30.0, "max_concurrency": 4}
    assert client.patch("/functions/f", json={"max_concurrency": 9, "retries": 1}).status_code == 200
    again = folder.deploy()
    assert again["plan"]["functions"][0]["policy"] == {"max_concurrency": 4}, "the rest is so already"
    assert (actions(again), again["deployed"]) == ({"f": "set", "g": "none"}, [])
    left = client.get("/functions/f").json()["policy"]
    assert left == {"timeout": 30.0, "max_concurrency": 4, "retries": 1}, "what the file does not state is left alone"


def test_functions_of_a_file_may_name_each_other_as_destinations(folder: Folder, gateway: Running) -> None:
    """Also one that the file declares after them: all are there before the first policy is set."""
    folder.write(
        f={"adapter": "./pirate", "on_success": {"function": "g"}},
        g={"adapter": "./dragon", "on_failure": {"function": "f"}},
    )
    assert actions(folder.deploy()) == {"f": "create", "g": "create"}
    client = gateway.client()
    assert client.get("/functions/f").json()["policy"] == {"on_success": {"function": "g"}}
    assert client.get("/functions/g").json()["policy"] == {"on_failure": {"function": "f"}}


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
    assert "nowhere: there is no such folder" in done.stderr


async def deployed_by_python(name: str, adapter: str) -> DeployReply:
    async with AsyncClient() as client:
        return await client.deploy(name, adapter)


def test_an_adapter_that_lies_on_the_hub(
    folder: Folder, gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a service file and by name, with the version that the same files have when they are named by their folder."""
    with running_hub() as hub:
        folder.environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "huggingface"),
            "NO_PROXY": "127.0.0.1",
        }
        hub.models["acme/pirate"] = {
            file.name: file.read_bytes() for file in (folder.root / "pirate").iterdir() if file.is_file()
        }
        folder.write(f={"adapter": "./pirate"}, g={"adapter": "hf:acme/pirate"})
        done = folder.deploy()
        assert actions(done) == {"f": "create", "g": "create"}
        digests = [entry["digest"] for entry in done["deployed"]]
        assert digests[0] == digests[1]
        assert actions(folder.deploy()) == {"f": "none", "g": "none"}
        one = folder.command("deploy", "h", "hf:acme/pirate", "--json")
        assert (one.returncode, json.loads(one.stdout)["digest"]) == (0, digests[0]), one.stderr
        for name, value in folder.environment.items():
            monkeypatch.setenv(name, value)
        assert asyncio.run(deployed_by_python("i", "hf:acme/pirate")).digest == digests[0]
        none = folder.command("deploy", "h", "hf:acme/nobody")
        assert (none.returncode, none.stderr.count("\n")) == (1, 2), none.stderr
        assert "hf:acme/nobody: the Hub has no such model" in none.stderr


@pytest.fixture
def tenants() -> Iterator[tuple[str, dict[str, Any]]]:
    """What API.md says of tenants that exist and that do not, over a dict."""
    known: dict[str, Any] = {"acme": {}, "initech": {}}

    async def tenant(request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if request.method == "PUT":
            known[name] = await request.json()
            return JSONResponse({"id": name}, 201)
        settings = {"limits": {}, "slo": {}, "weight": 1.0, "webhook_hosts": [], "file_bytes": 0}
        return JSONResponse({**settings, "declared": name == "initech", **known[name]})

    async def functions(request: Request) -> JSONResponse:
        if request.headers["x-garnish-tenant"] in known:
            return JSONResponse({"functions": [], "next": None})
        content = {"type": "not_found", "message": "there is no such tenant", "param": None, "request_id": "r"}
        return JSONResponse({"error": content}, 404)

    routes = [Route("/tenants/{name}", tenant, methods=["GET", "PUT"]), Route("/functions", functions)]
    with served(Starlette(routes=routes)) as url:
        yield url, known


def test_an_administrator_makes_and_changes_tenants(
    command_line: CommandLine, tenants: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, known = tenants
    folder = Folder(command_line, tmp_path, url, f"gak_{'0' * 12}_{'0' * 64}")
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
    kept = {"limits": {}, "weight": 2, "webhook_hosts": [], "file_bytes": 0}
    assert known["globex"] == {**kept, "slo": slo}
    assert [step["action"] for step in folder.deploy()["plan"]["tenants"]] == ["none"]
