"""Each study runs in its quick form and writes a whole report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = {"study", "commit", "machine", "versions", "settings", "seed", "simulated", "rows", "figures"}


@pytest.mark.parametrize(
    ("name", "options", "figures"),
    [
        ("engine", ["--dtype", "float32"], {"base_tok_s_1", "mixed_tok_s_8", "peft_base_tok_s_8", "over_peft"}),
        ("exactness", [], {"cases", "tokens", "mismatches", "ties"}),
    ],
)
def test_quick_run(stories_dir: Path, tmp_path: Path, name: str, options: list[str], figures: set[str]) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--seed", "3", "--json", str(file)]
    done = subprocess.run(
        [*command, "--model", str(stories_dir), *options], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert set(document) == KEYS
    assert (document["study"], document["seed"]) == (name, 3)
    assert figures <= set(document["figures"])
    if name == "exactness":
        assert document["figures"]["mismatches"] == 0
        assert document["figures"]["tokens"] > 100
