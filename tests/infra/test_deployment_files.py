"""Units and Containerfile: valid, and what they start takes these options."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from garnish.cli.main import app
from garnish.settings import SERVICE_STOP_SECONDS

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "infra" / "systemd").glob("*.service"))
CONTAINERFILE = (ROOT / "infra" / "container" / "Containerfile").read_text()


def takes(words: list[str]) -> None:
    """Fails when the command line does not know the command or one of its options."""
    command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    used = {word for word in words[1:] if word.startswith("-")}
    assert used <= known, used - known


def setting(unit: Path, name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(value)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_what_a_unit_starts(unit: Path) -> None:
    program, *words = setting(unit, "ExecStart").split()
    assert program == "/opt/garnish/bin/garnish"
    takes(words)
    assert int(setting(unit, "TimeoutStopSec")) > SERVICE_STOP_SECONDS + 30, "it may be killed only after the last call"
    assert setting(unit, "KillMode") == "mixed", "the children are stopped by their parent, in order"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed: units are NOT verified")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name.replace("@", "@gpu-0")
    copy.write_text(unit.read_text().replace("/opt/garnish/bin/garnish", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    mine = [line for line in (done.stdout + done.stderr).splitlines() if copy.name in line]
    assert mine == []


def test_the_containers_start_what_there_is() -> None:
    starts = re.findall(r"^ENTRYPOINT \[(.*)\]$", CONTAINERFILE, re.MULTILINE)
    assert len(starts) == 2
    for start in starts:
        program, *words = [word.strip().strip('"') for word in start.split(",")]
        assert program == "garnish"
        takes(words)
    takes(["gateway", "--host"])
    assert re.findall(r"^USER (.*)$", CONTAINERFILE, re.MULTILINE)[-1] == "garnish"


def test_the_containers_get_every_package() -> None:
    lines = re.findall(r"^COPY ((?!--).*)$", CONTAINERFILE, re.MULTILINE)
    copied = {path for line in lines for path in line.split()[:-1]}
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied | {"infra"}
    let_in = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    assert {path.split("/")[0] for path in copied} <= let_in
