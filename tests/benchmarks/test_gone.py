"""What benchmarks/faults/gone.py calls, and what it says of replies; a short run finds nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.gone import _problem
from benchmarks.faults.routes import REQUESTS

ROOT = Path(__file__).parents[2]
ERROR = json.dumps({"error": {"type": "unavailable", "message": "no store"}})


def test_every_route_of_the_api_document_is_called() -> None:
    paths = json.loads((ROOT / "gateway" / "openapi.json").read_text())["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == set(REQUESTS)


@pytest.mark.parametrize(
    ("status", "retry_after", "path", "text", "problem"),
    [
        (200, None, "/usage", "", ""),
        (404, None, "/usage", ERROR, ""),
        (503, "1", "/usage", ERROR, ""),
        (503, None, "/usage", ERROR, "no Retry-After"),
        (500, None, "/usage", ERROR, "an internal error"),
        (502, None, "/usage", "Bad gateway", "no error of the contract"),
        (400, None, "/usage", json.dumps({"error": "bad"}), "no error of the contract"),
        (503, None, "/readyz", "{}", ""),
    ],
)
def test_problems_of_replies(status: int, retry_after: str | None, path: str, text: str, problem: str) -> None:
    assert _problem(status, retry_after, path, text) == problem


def test_two_minutes_lose_nothing(stories_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.faults.gone", "--minutes", "1.5", "--model", str(stories_dir)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "gone.json")], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads((tmp_path / "gone.json").read_text())
    figures = document["figures"]
    assert figures["calls"] > 200 and figures["acknowledged"] > 10
    problems = {name: figures[name] for name in ("unanswered", "cut", "wrong", "unrecovered", "lost")}
    assert not any(problems.values()), (problems, document["rows"])
