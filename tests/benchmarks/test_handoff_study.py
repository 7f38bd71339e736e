"""The handoff study writes a whole report, and its drawn host tier is what the reference says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NOT RUN: a worker needs a core beside the engine's")
def test_quick(tmp_path: Path) -> None:
    target = tmp_path / "handoff.json"
    command = [sys.executable, "-m", "benchmarks.handoff", "--quick", "--json", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=250)
    document = json.loads(target.read_text())
    assert {row["width"] for row in document["rows"]} == {576, 4096}
    for row in document["rows"]:
        assert all(row[f"{kind}_p50_us"] > 0 for kind in ("roundtrip", "socket", "pinned", "threads", "bf16", "fp32"))
    assert {"roundtrip_p50_us_1", "over_socket_1_16x576", "pinned_over_threads_1_16x576"} <= set(document["figures"])
