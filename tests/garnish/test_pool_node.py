"""Starting a pool's node, where that goes wrong; that it goes well tests/e2e shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cluster.secret import create_secret
from garnish.pool_node import START_SECONDS, Spec, main
from infra.processes import processes_of, read_pid_file, tagged


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    state = tmp_path / "state"
    create_secret(state / "cluster.secret")
    return Spec(
        service="demo",
        pool="here",
        node="here-1",
        service_file=str(tmp_path / "serverless.yml"),
        state=str(state),
        gateway_url="http://127.0.0.1:9",
        secret_file=str(state / "cluster.secret"),
    )


def test_a_node_that_can_not_start_says_why_and_leaves_nothing(spec: Spec) -> None:
    """Terraform is told by the exit code."""
    Path(spec.service_file).write_text("service: demo\nbase_model: ./no-such-model\n")
    command = [sys.executable, "-m", "garnish.pool_node", "create", msgspec.json.encode(spec).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search(r"here-1 can't start: .*there is no directory .*no-such-model.* \(log: ", done.stderr)
    assert "Traceback" not in done.stderr
    assert processes_of(spec.key) == [] and list(tagged(spec.state, "")) == []
    assert read_pid_file(spec.key) is None


def test_stopping_what_is_not_there_is_done_already(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pool_node", "stop", msgspec.json.encode(spec).decode()])
    assert (main(), capsys.readouterr().err) == (0, "")


TERRAFORM = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def test_a_node_whose_terraform_was_killed_does_not_stay(spec: Spec) -> None:
    """Its service file is a pipe that nobody writes to: it starts, and never comes up."""
    os.mkfifo(spec.service_file)
    create_command = [sys.executable, "-m", "garnish.pool_node", "create", msgspec.json.encode(spec).decode()]
    with subprocess.Popen([sys.executable, "-c", TERRAFORM, *create_command]) as terraform:
        until(lambda: read_pid_file(spec.key) is not None)
        assert processes_of(spec.key) != []
        terraform.kill()
    until(lambda: processes_of(spec.key) == [] and read_pid_file(spec.key) is None, START_SECONDS / 2)


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
