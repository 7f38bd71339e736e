"""The study of a whole service on a GPU, here on a CPU over a tiny shape."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.service import QUICK, study


def test_a_service_is_called_cold_and_warm(tmp_path: Path, smollm_dir: Path) -> None:
    document = study(tmp_path, "tiny", "cpu", smollm_dir, QUICK, 3)
    rows = {(row["service"], row["load"]): row for row in document["rows"]}
    assert set(rows[("roomy", "one by one")]["states"]) == {"none"}
    assert set(rows[("tight", "one by one")]["states"]) == {"host"}
    for name in ("roomy", "tight"):
        assert rows[(name, "first calls")]["states"].get("none", 0) == 0
        for load in ("base", "adapters"):
            assert rows[(name, load)]["errors"] == 0 and rows[(name, load)]["ok"] == QUICK.requests
    assert document["figures"]["cold_over_warm_w8"] > 0
