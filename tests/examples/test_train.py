"""The training script as the quickstart uses it: one adapter of a few steps, in a directory of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
REPORT = EXAMPLES / "adapters" / "results.json"


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "adapters" / "train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_one_adapter_elsewhere(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "models" / "convert_stories.py")], check=True, timeout=240)
    committed, report = EXAMPLES / "adapters" / "stories260K" / "dragon", REPORT.read_bytes()
    before = (committed / "adapter_model.safetensors").read_bytes()
    done = train("dragon", "--base", "stories260K", "--steps", "2", "--out", str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "adapter_config.json").read_bytes() == (committed / "adapter_config.json").read_bytes()
    assert len((tmp_path / "mine" / "adapter_model.safetensors").read_bytes()) == len(before)
    assert (tmp_path / "mine" / "adapter_model.safetensors").read_bytes() != before
    assert (committed / "adapter_model.safetensors").read_bytes() == before
    assert REPORT.read_bytes() == report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("pirate", "--out", "x"), "--out takes one adapter, not 2"),
        (("dragon", "--steps", "2"), "needs --out"),
        (("dragon", "--steps", "0", "--out", "x"), "at least 1"),
    ],
)
def test_refused(arguments: tuple[str, ...], problem: str) -> None:
    done = train(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
