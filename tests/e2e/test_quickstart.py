"""What docs/quickstart.md has a new user paste: trained, deployed, tried on some calls, rolled back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from whole_service import Service, free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
HEADING = "## Train one, try it on a few calls, go back"
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
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


@pytest.mark.slow
def test_its_commands_do_what_it_says(tmp_path: Path, smollm_dir: Path) -> None:
    """In a folder that looks like a clone. The blocks share a shell, as they do for a reader."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name in ("examples", "models", "serverless.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    service = Service(tmp_path, free_port())
    try:
        process = service.spawn()
        assert process.stdout is not None
        assert any(line.startswith("ready") for line in process.stdout), (tmp_path / "err.txt").read_text()
        script = "".join(commands for commands, _ in blocks()).replace("127.0.0.1:8080", f"127.0.0.1:{service.port}")
        script = script.replace(".garnish/credentials.toml", "state/credentials.toml")
        script = re.sub(r"^(\.venv/bin/garnish .*?)( *#.*)?$", r"\1 --state state", script, flags=re.MULTILINE)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        shown = [line for _, output in blocks() for line in output.splitlines() if SAME_EVERYWHERE.match(line)]
        assert [line for line in done.stdout.splitlines() if SAME_EVERYWHERE.match(line)] == shown
    finally:
        service.stop()
