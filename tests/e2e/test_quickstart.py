"""What docs/guide/quickstart.md and README.md have a new user paste: trained, deployed, called, rolled back."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_service import Service

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "quickstart.md"
HEADING = "## Train one, try it on a few calls, go back"
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SAME_EVERYWHERE = re.compile(r"^(?:teas: (?:version|deleted)|teas:prod ->)")
"""Lines of the page's output that depend neither on the machine nor on the time."""


def blocks() -> list[tuple[str, str]]:
    """Commands and what the page shows of their output."""
    _, found, rest = PAGE.read_text().partition(HEADING)
    assert found
    return BLOCK.findall(rest.partition("\n## ")[0])


def test_the_page_has_the_commands() -> None:
    commands = "".join(commands for commands, _ in blocks())
    for expected in ("train.py", "garnish deploy", "garnish alias", "garnish rollback", "garnish delete"):
        assert expected in commands


@pytest.fixture
def service(tmp_path: Path, smollm_dir: Path) -> Iterator[Service]:
    """The demo's, in a folder that looks like a clone."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".garnish").symlink_to("state")
    for name in ("examples", "models", "serverless.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
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
    output = pasted(service, "bash", "-e", "-o", "pipefail", "-c", "".join(commands for commands, _ in blocks()))
    shown = [line for _, output in blocks() for line in output.splitlines() if SAME_EVERYWHERE.match(line)]
    assert [line for line in output.splitlines() if SAME_EVERYWHERE.match(line)] == shown


@pytest.mark.slow
def test_python_of_both_pages_runs(service: Service) -> None:
    """Each block by itself; the adapter that it deploys is one of the demo's."""
    scripts = [script for page in (ROOT / "README.md", PAGE) for script in PYTHON.findall(page.read_text())]
    assert len(scripts) == 3
    for script in scripts:
        adapter = "examples/adapters/SmolLM2-135M-Instruct/json"
        assert pasted(service, sys.executable, "-c", script.replace("path/to/adapter", adapter)).strip()
