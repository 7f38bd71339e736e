"""`garnish deploy -f`: the plan says what will be done, doing it twice does nothing, and nobody is surprised."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_gateway import Running

from adapters.local_store import LocalStore
from adapters.tenants import Limits, Tenants


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


def test_tenants_become_what_the_file_says(gateway: Running, tmp_path: Path) -> None:
    folder, admin = Folder(tmp_path, gateway.url, gateway.keys["admin"]), gateway.client("admin")
    store = Tenants(LocalStore(Path(gateway.config.registry)))
    store.put("other", declared=True, limits=Limits(adapters=2))
    admin.put("/tenants/acme", json={"limits": {"concurrent": 9}})
    tenants = "{acme: {limits: {adapters: 5}}, globex: {limits: {bytes: 1MiB}}, other: {}}"
    (tmp_path / "serverless.yml").write_text(f"service: s\nbase_model: b\ntenants: {tenants}\n")
    plan = [
        "tenant acme: set limits to adapters 5 (from concurrent 9)",
        "tenant globex: create",
        "tenant other: limits are adapters 2 by the service's own file; restart it with this one",
    ]
    assert folder.run("--dry-run").stdout.splitlines() == plan
    assert admin.get("/tenants/globex").status_code == 404
    actions = [step["action"] for step in folder.deploy()["plan"]["tenants"]]
    assert actions == ["change", "create", "restart"]
    found = [admin.get(f"/tenants/{name}").json()["limits"] for name in ("acme", "globex", "other")]
    assert found == [{"adapters": 5}, {"bytes": 1 << 20}, {"adapters": 2}]
    assert [step["action"] for step in folder.deploy()["plan"]["tenants"]] == ["none", "none", "restart"]
    # Without tenants in the file those of the service are left as they are.
    (tmp_path / "serverless.yml").write_text("service: s\nbase_model: b\n")
    assert folder.run("--dry-run").stdout == "tenant default: create\n"
