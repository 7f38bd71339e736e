"""The handoff study writes a whole report, and its drawn host tier is what the reference says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.handoff.model import HandoffModel, fit, predictions, worst_error
from node_agent.coldstart.profile import CpuLora

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NOT RUN: a worker needs a core beside the engine's")
def test_quick(tmp_path: Path) -> None:
    target = tmp_path / "handoff.json"
    command = [sys.executable, "-m", "benchmarks.handoff.handoff", "--quick", "--json", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=250)
    document = json.loads(target.read_text())
    assert {row["width"] for row in document["rows"]} == {576, 4096}
    measured = [row for row in document["rows"] if not row.get("predicted")]
    kinds = ("roundtrip", "pingpong", "socket", "pinned", "threads", "bf16", "fp32")
    for row in measured:
        assert all(row[f"{kind}_p50_us"] > 0 for kind in kinds)
    names = {"roundtrip_p50_us_1", "over_socket_1_16x576", "pinned_over_threads_1_16x576", "model_worst_error"}
    assert names <= set(document["figures"])
    predicted = {row["workers"] for row in document["rows"] if row.get("predicted")}
    assert predicted and not predicted & {row["workers"] for row in measured}
    assert document["settings"]["fitted"]["per_worker"] > 0


@given(
    fixed=st.floats(1, 50),
    per_worker=st.floats(0.1, 20),
    per_byte=st.floats(1e-5, 1e-3),
    counts=st.sampled_from([(1,), (3,), (1, 2), (1, 2, 4)]),
)
def test_the_model_finds_what_rows_were_made_with(
    fixed: float, per_worker: float, per_byte: float, counts: tuple[int, ...]
) -> None:
    slice_s = CpuLora(2e-5, 1e-9, 2e-11)
    made = HandoffModel(fixed, per_worker, per_byte, slice_s)
    rows: list[dict[str, Any]] = [
        {"workers": workers, "tokens": tokens, "width": width, "bytes": 2 * tokens * width, "elements": 64 * 4 * width}
        for workers in counts
        for tokens in (16, 64, 256)
        for width in (576, 4096)
    ]
    for row in rows:
        row["roundtrip_p50_us"] = made.roundtrip(row["workers"], row["bytes"])
        row["pinned_p50_us"] = made.pinned(row["workers"], row["bytes"], row["tokens"], row["elements"])
    model = fit(rows, per_worker)
    assert worst_error(model, rows) < 1e-3
    for row in predictions(model, rows):
        assert row["predicted"] and row["workers"] not in counts
        assert row["roundtrip_us"] == pytest.approx(
            made.roundtrip(row["workers"], 2 * row["tokens"] * row["width"]), 1e-3
        )
