"""What docs/guide/quickstart.md and README.md have a new user paste: trained, deployed, called, rolled back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_service import Service

from tests.support.ports import free_port
from tests.support.quickstart_page import (
    TRAIN,
    blocks,
    lay_out_clone,
    lines_same_everywhere,
    python_scripts,
    script,
)


def test_the_page_has_the_commands() -> None:
    commands = "".join(commands for commands, _ in blocks(TRAIN))
    for expected in ("train.py", "garnish deploy", "garnish alias", "garnish rollback", "garnish delete"):
        assert expected in commands


@pytest.fixture
def service(tmp_path: Path, smollm_dir: Path) -> Iterator[Service]:
    """The demo's, in a folder that looks like a clone."""
    lay_out_clone(tmp_path, "serverless.yml")
    service = Service(tmp_path, free_port())
    try:
        process = service.spawn()
        assert process.stdout is not None
        assert any(line.startswith("ready") for line in process.stdout), (tmp_path / "err.txt").read_text()
        yield service
    finally:
        service.stop()


def pasted(service: Service, *command: str) -> str:
    """What a command prints. Its last argument is a script of the pages."""
    command = (*command[:-1], command[-1].replace("127.0.0.1:8080", f"127.0.0.1:{service.port}"))
    done = subprocess.run(command, cwd=service.folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_its_commands_do_what_it_says(service: Service) -> None:
    """The blocks share a shell, as they do for a reader."""
    output = pasted(service, "bash", "-e", "-o", "pipefail", "-c", script(TRAIN, service.port))
    shown = "".join(output for _, output in blocks(TRAIN))
    assert lines_same_everywhere(output) == lines_same_everywhere(shown)


@pytest.mark.slow
def test_python_of_both_pages_runs(service: Service) -> None:
    """Each block by itself."""
    for text in python_scripts():
        assert pasted(service, sys.executable, "-c", text).strip()
