"""examples/ci/garnish.yml: it is a workflow, and its commands plan and deploy against a running gateway."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from running_gateway import Running

WORKFLOW = Path(__file__).parents[2] / "examples" / "ci" / "garnish.yml"
EXPRESSION = re.compile(r"\$\{\{ *([\w.]+) *\}\}")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(WORKFLOW.read_text())
    return found


class Checkout:
    """A repository with a service file, in which jobs run as a runner would run them."""

    def __init__(self, workflow: dict[str, Any], folder: Path, gateway: Running) -> None:
        self.workflow, self.folder = workflow, folder
        command = folder / "bin" / "garnish"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m garnish.cli.main "$@"\n')
        command.chmod(0o755)
        self.values = {"vars.GARNISH_URL": gateway.url, "secrets.GARNISH_API_KEY": gateway.keys["acme"]}
        self.summary = folder / "summary.md"

    def run(self, job: str) -> subprocess.CompletedProcess[str]:
        """The job's commands but for those that install."""
        given = {name: EXPRESSION.sub(lambda found: self.values[found[1]], text) for name, text in self._env().items()}
        steps = [step["run"] for step in self.workflow["jobs"][job]["steps"] if "run" in step]
        (script,) = [step for step in steps if not step.startswith("pip install")]
        environment = {**os.environ, **given, "GITHUB_STEP_SUMMARY": str(self.summary)}
        environment |= {"XDG_CONFIG_HOME": str(self.folder), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        environment.setdefault("PYTHONPATH", str(WORKFLOW.parents[2]))
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)

    def _env(self) -> dict[str, str]:
        found: dict[str, str] = self.workflow["env"]
        return found


@pytest.fixture
def checkout(workflow: dict[str, Any], gateway: Running, tmp_path: Path, stories_adapters: dict[str, Path]) -> Checkout:
    folder = tmp_path / "checkout"
    shutil.copytree(stories_adapters["pirate"], folder / "adapters" / "pirate")
    functions = "functions: {pirate: {adapter: ./adapters/pirate, alias: prod}}\n"
    (folder / "serverless.yml").write_text(f"service: s\nbase_model: ./base\ntenants: {{acme: {{}}}}\n{functions}")
    return Checkout(workflow, folder, gateway)


def test_it_is_a_workflow(workflow: dict[str, Any]) -> None:
    assert set(workflow) == {"name", "on", "permissions", "concurrency", "defaults", "env", "jobs"}
    assert set(workflow["on"]) == {"pull_request", "push"}
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert {"runs-on", "if", "timeout-minutes", "steps"} <= set(job)
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    known = {"github.ref", "vars.GARNISH_URL", "vars.GARNISH_PACKAGE", "secrets.GARNISH_API_KEY"}
    assert set(EXPRESSION.findall(WORKFLOW.read_text())) == known
    assert WORKFLOW.read_text().count("${{") == len(EXPRESSION.findall(WORKFLOW.read_text()))


def test_a_pull_request_plans_and_a_merge_deploys(checkout: Checkout, gateway: Running) -> None:
    planned = checkout.run("plan")
    line = "function acme/pirate: create a version, and move prod to it (from nothing)\n"
    assert (planned.returncode, planned.stdout) == (0, line), planned.stderr
    assert checkout.summary.read_text() == line
    assert gateway.client().get("/functions").json()["functions"] == []

    deployed = checkout.run("deploy")
    assert deployed.returncode == 0, deployed.stderr
    assert "pirate: version 1, rank 8" in deployed.stdout
    assert gateway.client().get("/functions/pirate").json()["aliases"]["prod"] == 1
    assert checkout.run("plan").stdout == "function acme/pirate: nothing to do, prod is version 1\n"
    assert checkout.run("deploy").returncode == 0, "a second run changes nothing"


def test_a_pull_request_with_a_broken_adapter_fails(checkout: Checkout) -> None:
    config = checkout.folder / "adapters" / "pirate" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 8', '"r": 4'))
    planned = checkout.run("plan")
    assert planned.returncode == 1
    assert "garnish: validation_failed: function acme/pirate: " in planned.stderr
    assert "wrong shape" in planned.stderr


def test_a_service_that_is_away_or_refuses_the_key_fails_both(checkout: Checkout) -> None:
    checkout.values["secrets.GARNISH_API_KEY"] = "gsk_acme_wrong"
    for job in ("plan", "deploy"):
        done = checkout.run(job)
        assert done.returncode == 1 and "the key is not valid (the one that was sent: GARNISH_API_KEY)" in done.stderr
