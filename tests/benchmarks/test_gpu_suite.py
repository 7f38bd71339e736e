"""The GPU suite on a CPU and a tiny shape: every part runs or says what is not there, and wrong results are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.base_model import projection_widths
from benchmarks.gpu import cold_starts, exact, layer_check, steps, suite
from benchmarks.gpu.check import WrongResult
from benchmarks.gpu.engine import adapter_bytes
from benchmarks.gpu.parts import Skipped, failures, run_parts
from benchmarks.gpu.suite import QUICK_S, SECONDS, figures_of, study
from kernels.gpu_ops import MIN_PIECE, Rows
from kernels.gpu_reference import TorchOperations
from tests.benchmarks.studies import run_study
from tests.support.random_model import SHAPES

CPU = torch.device("cpu")
PARTS = ["smoke", "merged", "graphs", "decode", "prefill", "lora", "kernels"]
"""tests/benchmarks/test_coldstart_gpu.py has the others."""


def run(root: Path, parts: list[str], done: Any = lambda _: None, runner: str = "auto") -> dict[str, Any]:
    return study(root, CPU, "tiny", runner=runner, parts=parts, quick=True, seed=3, seconds=QUICK_S, done=done)


def rows_of(document: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["part"] == part]


def test_every_part_runs_or_says_why_not(tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = []
    document = run(tmp_path, PARTS, saved.append)
    assert not failures(document)
    assert [row["part"] for row in document["rows"] if "took_s" in row] == PARTS, "in order of worth"
    assert len(saved) == len(PARTS) and saved[-1] == document
    skipped = {row["part"]: row["skipped"] for row in document["rows"] if "skipped" in row}
    assert skipped == {
        "graphs": "runner auto captures no graphs", "kernels": "Triton's interpreter says nothing of times",
    }  # fmt: skip
    assert {row["operation"] for row in rows_of(document, "smoke")[:-1]} == {
        "bgmv", "mbgmv", "sgmv", "add_rms_norm", "rotate_and_store", "silu_mul", "decode_attention",
        "prefill_attention",
    }  # fmt: skip
    figures = document["figures"]
    for rows in (1, 2, 6):
        assert figures[f"decode_over_floor_b{rows}"] > 0 and figures[f"served_ms_b{rows}"] > 0
    assert figures["prefill_share_of_peak_t16"] > 0 and figures["prefill_lora_over_base_t16"] > 0
    for targets in ("qkv", "all"):
        assert figures[f"lora_over_base_cpu_{targets}_n3_rmixed"] > 0
    assert set(rows_of(document, "lora")[-2]["paper_r2"]) == {"bgmv", "mbgmv"}
    assert figures["merged_control_below"] > exact.TOLERANCE > figures["merged_adapter_below"]


def test_a_layer_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TorchOperations):
        def silu_mul(self, gate_up: torch.Tensor, *, out: torch.Tensor) -> None:
            super().silu_mul(gate_up, out=out)
            out[0, 0] += 0.1 * out.abs().max()

    monkeypatch.setattr(layer_check, "layer_operations", lambda _: Wrong())
    with pytest.raises(WrongResult, match=r"silu_mul in torch\.float32"):
        list(layer_check.check_layers(CPU, 1, layer_check.SHAPES[:1]))


def test_a_kernel_that_forgets_pieces_of_a_context_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TorchOperations):
        def decode_attention(self, q: Any, cache: Any, rows: Rows, **named: Any) -> None:
            first = Rows(rows.context_len.clamp(max=MIN_PIECE), rows.block_table)
            super().decode_attention(q, cache, first, **named)

    monkeypatch.setattr(layer_check, "layer_operations", lambda _: Wrong())
    with pytest.raises(WrongResult, match=r"decode_attention in torch\.float32"):
        list(layer_check.check_layers(CPU, 1, layer_check.SHAPES[:1]))


def test_the_runner_for_gpus_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` does not choose it before this suite has passed; its graphs run here as calls."""
    asked: list[str] = []

    def note(*_: Any, runner: str, **__: Any) -> dict[str, Any]:
        asked.append(runner)
        return {"rows": [], "figures": {}}

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(suite, "study", note)
        patch.setattr(suite, "publish", lambda *_: None)
        run_study(patch, "gpu.suite")
    assert asked == ["cuda"]
    document = run(tmp_path, ["graphs", "decode"], runner="cuda")
    assert not failures(document)
    assert document["figures"]["graphs_speedup_b1"] > 0 and document["figures"]["decode_over_floor_b6"] > 0


def test_floors() -> None:
    """Of the shape that is measured on a GPU, by hand: 7B has 6.74 billion weights, 0.13 of them the embedding's."""
    widths = projection_widths(SHAPES["7b"])
    base: Any = SimpleNamespace(num_layers=32, widths=widths)
    engine: Any = SimpleNamespace(base=base)
    store: Any = SimpleNamespace(base=base, pool=SimpleNamespace(data=torch.zeros(1, dtype=torch.bfloat16)))
    assert adapter_bytes(store, 16, (0, 1, 2)) == 32 * 3 * 16 * (4096 + 4096) * 2
    assert steps.prompt_flops(engine, 1) == pytest.approx(2 * (6_738_415_616 - 2 * 32000 * 4096), rel=1e-3)
    assert steps.prompt_flops(engine, 2048) - 2048 * steps.prompt_flops(engine, 1) == pytest.approx(
        32 * 2 * 4096 * (2048**2 - 2048)
    )


def test_a_merge_that_is_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "merge", lambda *_: None)
    (wrong,) = failures(run(tmp_path, ["merged"]))
    assert wrong.startswith("merged: the adapter changes too little")


def test_an_adapter_that_is_left_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = exact._answers

    def without(engine: Any, prompts: Any, adapters: Any) -> Any:
        found = real(engine, prompts, (None,))
        return found | {(adapters[1].digest, i): found[None, i] for i in range(len(prompts))}

    monkeypatch.setattr(exact, "_answers", without)
    (wrong,) = failures(run(tmp_path, ["merged"]))
    assert wrong.startswith("merged: adapter: ") and "below the best, PEFT's 0.0" in wrong


def test_a_runner_that_can_not_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node_agent.runner.lightllm_open.find_spec", lambda _: None)
    rows = run(tmp_path, ["decode", "lora"], runner="lightllm")["rows"]
    assert "runner lightllm, kernel auto: runner: LightLLM is not installed" in rows[0]["skipped"]
    assert "LightLLM is not installed" in rows[2]["skipped"]


def test_a_part_that_fails_leaves_the_others_their_time() -> None:
    def broken(until: float) -> Any:
        yield {"seen": 1}
        raise ValueError("no such stream")

    def absent(until: float) -> Any:
        raise Skipped("nothing is here")

    ends: list[float] = []

    def last(until: float) -> Any:
        ends.append(until)
        yield {"mismatches": 2, "cases": 3, "tokens": 4, "ties": 0}

    saved: list[int] = []
    rows = run_parts(
        {"broken": broken, "absent": absent, "exact": last}, {"exact": 2.0}, 100.0, lambda rows: saved.append(len(rows))
    )
    kinds = [next(key for key in row if key != "part") for row in rows]
    assert kinds == ["seen", "failed", "took_s", "skipped", "took_s", "mismatches", "took_s"]
    assert saved == [3, 5, 7]
    document = {"rows": rows, "figures": figures_of(rows)}
    first, second = failures(document)
    assert "no such stream" in first and second == "2 answers differ from PEFT's"


def test_all_parts_have_a_time(tmp_path: Path) -> None:
    assert {*PARTS, *cold_starts.PARTS} == set(SECONDS)
    assert sum(SECONDS.values()) < 480, "eight minutes"
