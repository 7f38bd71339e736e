"""Each study runs in its quick form and writes a whole report.

Those that take longest are in `make test-long` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.studies import KeptService, run_study

KEYS = {"study", "commit", "machine", "versions", "settings", "seed", "simulated", "rows", "figures"}
SERVE = {
    *(f"{figure}_{model}" for model in ("smollm2", "llama12") for figure in (
        "base_tok_s", "mixed_tok_s", "over_peft", "over_peft_static_base", "added_step_over_floor",
        "padded_over_mixed_step",
    )),
    "gateway_added_p50_ms", "http_mixed_tok_s", "open_ttft_p99_ms", "open_late_max_ms",
}  # fmt: skip
STUDIES = {"coldstart.default": "coldstart_default"}
"""Studies that reports call by another name than the module's."""
SHARING = ("engine.engine", "serve.serve")
"""They start equal services."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptService]:
    service = KeptService(tmp_path_factory.mktemp("kept"))
    yield service
    service.close()


@pytest.mark.parametrize(
    ("name", "options", "figures"),
    [
        (
            "engine.engine",
            ["--dtype", "float32", "--model"],
            {"base_tok_s_1", "mixed_tok_s_8", "peft_base_tok_s_8", "over_peft"},
        ),
        pytest.param("serve.serve", ["--base"], SERVE, marks=pytest.mark.slow),
        pytest.param(
            "serve.versions",
            ["--before", "", "--model"],
            {"ttft_1_s_after", "tok_s_8_after_worst"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "push.push", ["--model"], {"first_token_s", "ttft_s_p95_ratio", "versions_last"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "faults.restored",
            ["--model"],
            {"all_s_6", "worst_s_6", "link_share_6", "leader_s", "worst_leader_s"},
            marks=pytest.mark.slow,
        ),
        ("gateway.random_keys", ["--model"], {"ttft_p99_ms_beside_nothing", "ttft_p99_ms_beside_flood", "flood_rps"}),
        (
            "gateway.control_plane",
            ["--model"],
            {"redis_in_mb_s", "record_cpu_share", "placement_cpu_p99_ms", "wall_p99_ratio", "store_reads_s"},
        ),
        ("gateway.gateway", ["--model"], {"rps", "added_p50_ms", "added_p99_ms", "idle_streams_held"}),
        (
            "scheduling.scheduling",
            ["--model"],
            {
                *(
                    f"{figure}_{policy}_sim60_papers"
                    for figure in ("attain", "mean_tpt", "decision_p99_us")
                    for policy in (
                        "rank_aware",
                        "toppings",
                        "first_fit",
                        "random",
                        "most_idle",
                        "dlora",
                    )
                ),
                "attain_rank_aware_testbed8_papers_0.6",
                "mean_tpt_dlora_testbed8_papers_0.6",
                "oracle_gap_papers",
            },
        ),
        (
            "scheduling.fidelity",
            ["--dtype", "float32", "--model"],
            {"ttft_error", "tpt_error", "attain_gap", "speedup_over_real_time"},
        ),
        (
            "registry.scale",
            ["--model"],
            {"deploy_ms_at_40", "deploy_ms_at_400", "resolve_us_at_4000", "list_page_ms", "s3_gc_s"},
        ),
        ("exactness.exactness", ["--model"], {"cases", "tokens", "mismatches", "ties"}),
        (
            "perfmodel.perfmodel",
            ["--dtype", "float32", "--threads", "1", "--adapter-memory", "16", "--model"],
            {"r2_decode", "r2_prefill", "r2_paper_form", "heldout_median_error", "eval_us"},
        ),
        ("fairness.fairness", ["--model"], {"share_error", "victim_ttft_ratio", "strict_attain", "standard_attain"}),
        pytest.param(
            "coldstart.default",
            ["--model"],
            {
                *(f"full_over_pipeline_{kind}{end}" for kind in ("ttft", "tpt", "e2e") for end in ("", "_upper")),
                "pairs_pipeline_S3_t16_0.68",
                "cpu_workers_e",
                "refused",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_quick_run(
    stories_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: KeptService,
    name: str,
    options: list[str],
    figures: set[str],
) -> None:
    file = tmp_path / "report.json"
    arguments = ["--quick", "--seed", "3", "--json", str(file), *options, str(stories_dir)]
    if name in SHARING:
        monkeypatch.setattr(f"benchmarks.{name}.HttpService", kept.open)
    run_study(monkeypatch, name, *arguments)
    if name == SHARING[-1]:
        kept.close()
    document = json.loads(file.read_text())
    assert set(document) == KEYS
    assert (document["study"], document["seed"]) == (STUDIES.get(name, name.partition(".")[2]), 3)
    assert figures <= set(document["figures"])
    if name == "exactness.exactness":
        assert document["figures"]["mismatches"] == 0
        assert document["figures"]["tokens"] > 100
