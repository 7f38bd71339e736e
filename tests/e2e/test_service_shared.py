"""Two real nodes, two gateway workers, Redis: under load a node, a worker and Redis are killed, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "form",
    [(), pytest.param(("--every", "4"), marks=pytest.mark.slow)],
    ids=["storm", "one part at a time"],
)
def test_nothing_is_wrong_unanswered_lost_or_leaked(stories_dir: Path, tmp_path: Path, form: tuple[str, ...]) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.faults.chaos", "--quick", "--seed", "1", "--json", str(file), *form]
    done = subprocess.run(
        [*command, "--model", str(stories_dir)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    figures = document["figures"]
    assert document["study"] == "chaos"
    names = ("wrong_tokens", "unanswered", "lost_acknowledged", "leaked", "policies_wrong")
    assert not any(figures[name] for name in names), json.dumps(document, indent=1)
    assert figures["done"] > 10
    assert figures["bounded_calls"] > 0 and figures["writes_acknowledged"] > 5
    harmed = document["rows"][0]["kills"]
    assert {"redis", "worker"} <= set(harmed) and {"engine", "api"} & set(harmed), harmed
    if form:
        assert figures["done"] + figures["refused"] == figures["requests"] and "gateway" in harmed, harmed
