"""What `garnish nodes` says of forecasts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from garnish.cli.nodes import observed_over_forecast
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
