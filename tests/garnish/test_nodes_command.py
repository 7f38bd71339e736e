"""What `garnish nodes` says of forecasts, GPUs and CPU workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from garnish.cli.nodes import gpu_shown, observed_over_forecast, workers_shown
from tests.cluster.measured import PROFILE


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({}, "no model"),
        ({"measuring": 0.0}, "measuring, 0%"),
        ({"measuring": 0.424}, "measuring, 42%"),
        ({"performance": msgspec.to_builtins(PROFILE.model)}, "-"),
        ({"performance": msgspec.to_builtins(PROFILE.model), "forecast_ratio": 1.0349}, "1.03"),
        ({"performance": msgspec.to_builtins(PROFILE.model), "forecast_ratio": 1.31}, "1.31, off"),
        ({"performance": msgspec.to_builtins(PROFILE.model), "forecast_ratio": 0.75}, "0.75, off"),
    ],
)
def test_forecasts_are_shown_where_there_are_any(record: dict[str, Any], shown: str) -> None:
    assert observed_over_forecast(record) == shown


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({}, "-"),
        ({"gpu": {"uuid": "GPU-1"}}, "GPU-1"),
        (
            {
                "gpu": {"uuid": "GPU-1", "index": 2, "name": "L4", "memory": 24 << 30, "slow_link": "half of it"},
                "gpu_load": {"memory_used": 5 << 30, "utilisation": 0, "temperature": 43, "throttled": ["thermal"]},
            },
            "2 L4, 5.0 GiB of 24.0 GiB, 0 %, 43 C, thermal, slow link",
        ),
        ({"gpu": {"uuid": "GPU-1", "name": "L4", "problem": "it does not return"}}, "L4, it does not return"),
    ],
)
def test_a_gpu_is_shown_as_far_as_it_is_known(record: dict[str, Any], shown: str) -> None:
    assert gpu_shown(record) == shown


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"id": "n1"}, ""),
        ({"id": "n1", "cpu_workers": 2}, ""),
        ({"id": "n1", "cpu_workers": 0, "cpu_workers_reason": "little to gain"}, "n1: 0 CPU workers: little to gain"),
        ({"id": "n1", "cpu_workers": 1, "cpu_workers_reason": "as set"}, "n1: 1 CPU worker: as set"),
    ],
)
def test_the_reason_for_cpu_workers_is_shown_where_there_is_one(record: dict[str, Any], shown: str) -> None:
    assert workers_shown(record) == shown
