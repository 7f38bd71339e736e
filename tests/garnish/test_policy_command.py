"""How `garnish policy` reads the fields that it is given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import typer

from adapters.functions import Policy, parse_policy
from garnish.cli import policy


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("idle_ttl=15m", 900),
        ("max_concurrency=8", 8),
        ("slo_class=strict", "strict"),
        ("prefetch=", None),
        ('warm=[{"cron": "0 9 * * *", "for": "15m"}]', [{"cron": "0 9 * * *", "for": 900}]),
        ('warm=[{"cron": "0 9 * * *", "for": 60}]', [{"cron": "0 9 * * *", "for": 60}]),
    ],
)
def test_a_field_is_what_a_gateway_takes(written: str, value: Any) -> None:
    field, read = policy._field(written)
    assert (field, read) == (written.partition("=")[0], value)
    if value is not None:
        parse_policy(msgspec.json.decode(msgspec.json.encode({field: read})), Policy())


@pytest.mark.parametrize(
    "written",
    ["max_concurrency", "idle_ttl=soon", 'warm=[{"cron": "0 9 * * *", "for": "90500ms"}]', 'warm=[{"for": "soon"}]'],
)
def test_a_mistake_names_the_field(written: str) -> None:
    with pytest.raises(typer.BadParameter, match=written.partition("=")[0]):
        policy._field(written)
