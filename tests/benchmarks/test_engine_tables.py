"""The engine's table shows what a report has, and reports of before do without the newer lines."""

from __future__ import annotations

from benchmarks.common.report import load, report
from benchmarks.engine.engine import WORKLOADS, summarise
from benchmarks.engine.neighbours import figures_of
from benchmarks.engine.prompts import prompt_figures
from benchmarks.engine.tables import engine_table, neighbours_table


def rows() -> list[dict[str, object]]:
    """Two rounds in which the peer's fp32 is faster, and its bf16 has the faster steps."""
    speeds = {"engine": (40.0, 10.0), "peft_bfloat16": (10.0, 16.0), "peft_float32": (20.0, 25.0), "http": (30.0, None)}
    return [
        {"round": index, "workload": workload.name, "variant": variant, "ttft_ms": 5.0,
         "tok_s": tok_s / (1 + index if variant == "engine" else 1), "step_ms": step}
        for index in range(2) for workload in WORKLOADS for variant, (tok_s, step) in speeds.items()
    ]  # fmt: skip


def test_a_peer_counts_in_its_faster_dtype() -> None:
    figures = summarise(rows())
    assert figures["peft_base_tok_s_8"] == 20.0
    assert (figures["over_peft_mixed_8"], figures["over_peft_mixed_8_min"]) == (1.5, 1.0)
    assert (figures["step_over_peft_base_1"], figures["step_over_peft_base_1_min"]) == (1.6, 1.6)


def test_first_tokens_are_compared_in_their_own_round() -> None:
    found = prompt_figures([
        {"round": index, "products_512_ms": 100.0 * index, "engine_512_ms": 120.0 * index, "products_37_ms": 10.0,
         "engine_37_ms": 10.0 + index, "http_37_ms": 20.0 * index}
        for index in (1, 2, 3)
    ])  # fmt: skip
    assert (found["prefill_512_over_products"], found["prefill_512_over_products_max"]) == (1.2, 1.2)
    assert (found["first_token_37_over_products"], found["first_token_37_over_products_max"]) == (1.2, 1.3)
    assert (found["http_first_token_37_over_products"], found["http_first_token_37_over_products_max"]) == (4.0, 6.0)


def test_lines_of_steps_and_first_tokens_are_there_where_they_were_measured() -> None:
    document = load("engine")
    newer = {f"step_over_peft_{w.name}{tail}": 1.5 for w in WORKLOADS for tail in ("", "_min")}
    for name in ("prefill_512", "first_token_37", "http_first_token_37"):
        newer |= {f"{name}_over_products": 1.1, f"{name}_over_products_max": 1.2}
    older = {name: value for name, value in document["figures"].items() if name not in newer}
    assert "fp32 products" not in engine_table(document | {"figures": older})
    text = engine_table(document | {"figures": older | newer})
    assert "| 512 prompt tokens, base, in process: over torch's fp32 products | 1.10 | 1.20 |" in text


def test_neighbours() -> None:
    rounds = [{"round": 0, "default_alone_ms": 10.0, "default_busy_ms": 200.0, "limited_alone_ms": 10.1,
               "limited_busy_ms": 25.0}]  # fmt: skip
    settings = {"model": "m", "dtype": "bfloat16", "rounds": 1, "spin": "10000", "default_spin": "300000"}
    figures = figures_of(rounds) | {"probe_before_ms": 1.0, "probe_after_ms": 1.0}
    text = neighbours_table(report("neighbours", settings, 0, rounds, figures))
    assert "| a node's limit (10000 polls) | 10.1 ms | 25.0 ms | 2.48 (2.48) |" in text
    assert "Alone, the limit takes 1.010 (1.010) times as long as the default." in text
