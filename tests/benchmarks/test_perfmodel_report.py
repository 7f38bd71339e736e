"""The performance model's table and plot say what the report has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.report import PACKAGES
from benchmarks.pages.plots import save
from benchmarks.perfmodel.tables import perfmodel_plot, perfmodel_table, perfmodel_vllm_table
from cluster.performance_fit import DecodeSample, PaperForm
from tests.cluster.measured import PROFILE


def document() -> dict[str, Any]:
    grid = [DecodeSample(b, 100, b * r, b * r, b * r, 0.02 + b * r * 1e-5) for b in (4, 8) for r in (8, 16, 32)]
    paper = [PaperForm(kernel, 1e-5, 0.02, 0.75, 6) for kernel in ("bgmv", "mbgmv")]
    names = ("r2_decode", "r2_prefill", "r2_paper_bgmv", "r2_paper_mbgmv", "r2_grid_whole_model", "r2_decode_repeats")
    errors = {
        f"{name}_{kind}": 0.0321 for name in ("heldout_median_error", "set_aside") for kind in ("decode", "prefill")
    }
    return {
        "commit": "abc", "machine": {"cpu": "a processor", "cores": 2}, "versions": dict.fromkeys(PACKAGES, "1"),
        "seed": 0,
        "settings": {"model": "a model", "dtype": "bfloat16", "threads": 2, "rounds": 5},
        "rows": [
            {"kind": "model", "model": msgspec.to_builtins(PROFILE.model),
             "heldout_by_term": {"adapter_ranks": 0.0456}},
            *({"kind": kind, "measured_ms": 10.0 * i, "forecast_ms": 10.5 * i}
              for kind in ("decode", "prefill") for i in (1, 2, 3)),
            *({"kind": "grid", **msgspec.to_builtins(sample)} for sample in grid),
            *({"kind": "paper", **msgspec.to_builtins(form)} for form in paper),
        ],
        "figures": {
            **{name: 0.9 + 0.01 * i for i, name in enumerate(names)}, **errors,
            "eval_us": 2.5, "probe_before_ms": 1.0, "probe_after_ms": 1.1,
        },
    }  # fmt: skip


def test_the_table_has_the_figures() -> None:
    text = " ".join(perfmodel_table(document()).split())  # its paragraphs are wrapped
    assert "| decode | 0.9000 | 3.2% | 3 (0) |" in text
    assert "| paper's form, MBGMV: sum of ranks | 0.9300 | | 6 |" in text
    assert "30.00 ms + 100 us a row + 10 ns a token of context + 1.00 us of the sum of ranks over distinct" in text
    assert "sum of ranks over distinct adapters 4.56%" in text


def test_the_table_of_vllm_has_the_figures() -> None:
    model = msgspec.to_builtins(PROFILE.model)
    decode, prefill = model["decode"] | {"padded_rank": 64}, model["prefill"]
    changed: dict[str, Any] = document()
    changed["settings"] |= {"max_loras": 4, "max_lora_rank": 64}
    changed["figures"] |= {"rounds": 3.5, "load_latency_ms": 12.0, "load_gb_per_s": 1.5}
    changed["rows"][0] = {
        "kind": "model", "decode": decode, "prefill": prefill, "key": {"hardware": "a processor, vLLM 0.32"},
        "errors_by_padded_rank": {kind: {"64": 0.031, "0": 0.054} for kind in ("decode", "prefill")},
    }  # fmt: skip
    text = " ".join(perfmodel_vllm_table(changed).split())
    assert "| decode | 0.9000 | 3.2% | 3 (0) | rank 64 |" in text and "| 3 (0) | their own ranks |" in text
    assert "`max_loras` 4, `max_lora_rank` 64, 3.5 repeats" in text
    assert "with own ranks 5.4% and 5.4%; with rank 64 for each adapter 3.1% and 3.1%." in text


def test_the_plot_shows_every_configuration(tmp_path: Path) -> None:
    figure = perfmodel_plot(document())
    decode, prefill, grid = figure.axes
    assert [len(axis.collections[0].get_offsets()) for axis in (decode, prefill)] == [3, 3]
    assert [len(points.get_offsets()) for points in grid.collections] == [3, 3]
    files = [tmp_path / f"{i}.svg" for i in range(2)]
    for file in files:
        save(perfmodel_plot(document()), file)
    assert files[0].read_bytes() == files[1].read_bytes()
