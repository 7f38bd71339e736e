"""Which tests of studies are in `make test`: those that run a study once, and those that hold pages and committed
reports. All others are in `make test-long`."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ALL = ("test_",)
IN_EVERY_RUN: dict[str, tuple[str, ...]] = {
    "test_ablation.py": ("test_quick_run",),
    "test_autoscale_report.py": ("test_the_page_and_the_plot",),
    "test_batches_study.py": ("test_figures_compare_the_orders_by_medians",),
    "test_chaos_jobs.py": ("test_nothing_is_wrong_where_all_ended_as_it_should",),
    "test_chaos_policies.py": ("test_an_acknowledged_write_must_be_there_or_a_later_one",),
    "test_coldstart_default.py": ("test_table", "test_all_services_get_the_same_calls"),
    "test_coldstart_gpu.py": ("test_every_part_runs_and_one_that_fails_is_named",),
    "test_engine_tables.py": ("test_neighbours",),
    "test_engines_study.py": ALL,
    "test_eviction_study.py": ("test_quick_run",),
    "test_forecast_study.py": ("test_quick_run",),
    "test_front_page.py": ALL,
    "test_gone.py": ALL,
    "test_gpu_service.py": ALL,
    "test_gpu_suite.py": ("test_every_part_runs_or_says_why_not",),
    "test_gpu_tools.py": ("test_without_a_gpu_it_says_so",),
    "test_handoff_study.py": ("test_quick",),
    "test_latency.py": ("test_definitions",),
    "test_link_bytes.py": ("test_the_committed_report_is_what_the_code_computes",),
    "test_load.py": ("test_the_command",),
    "test_many_foreign.py": ALL,
    "test_many_study.py": ("test_cells",),
    "test_memory_study.py": ("test_quick_run",),
    "test_neighbours.py": ("test_figures_are_of_the_rounds_own_ratios",),
    "test_pages.py": ALL,
    "test_perfmodel_report.py": ("test_the_table_has_the_figures",),
    "test_placement_study.py": ("test_quick_run",),
    "test_plan_replay.py": (
        "test_first_choices_lose_little",
        "test_no_kind_is_assisted_unmeasured",
        "test_learning_ends_regret",
        "test_the_committed_report_is_within_the_bounds",
    ),
    "test_prefetch_study.py": ("test_a_report_has_a_table",),
    "test_prefix_study.py": ("test_ratios_are_of_the_same_round_model_and_length",),
    "test_remote_store.py": ("test_figures",),
    "test_rounding.py": ("test_quick_run",),
    "test_rule.py": ALL,
    "test_serve_batches.py": ("test_figures",),
    "test_studies.py": ALL,
    "test_tether.py": ("test_a_killed_benchmark_leaves_no_process",),
}
"""Names, or their beginnings, by file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the other tests of this folder as slow."""
    for item in items:
        if item.path.parent == FOLDER and not item.name.startswith(IN_EVERY_RUN[item.path.name]):
            item.add_marker(pytest.mark.slow)
