"""Checks of structured output's forms: bounded in time and memory, whatever the form."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from cluster.errors import ServiceError
from cluster.messages import Grammar
from gateway.calls.grammars import GrammarChecks, StatedForm

GOOD = Grammar("json", '{"type": "integer"}')
DEFINITIONS = {
    f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{(i + 1) % 300}"}, "b": {"pattern": "^[a-z]{0,300}$"}}}
    for i in range(300)
}
PROPERTIES = {f"q{i}": {"$ref": "#/$defs/d0"} for i in range(490)}


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    with closing(GrammarChecks()) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuvwxyz"]}),
         "its check takes more than"),
        ("[" * 60_000, "recursion"),
        (json.dumps({"$defs": DEFINITIONS, "properties": {**PROPERTIES, "z": {"pattern": "(?=x)"}}}), "look-around"),
    ],
)  # fmt: skip
def test_evil_forms_are_refused_in_time(checks: GrammarChecks, text: str, why: str) -> None:
    async def check() -> None:
        evil = Grammar("json", text)
        for _ in range(2):
            with pytest.raises(ServiceError, match=why):
                await checks.check(StatedForm("structured_outputs.json", evil), time.monotonic() + 60)
        await checks.check(StatedForm("structured_outputs.json", GOOD), time.monotonic() + 60)

    began = time.monotonic()
    asyncio.run(check())
    assert time.monotonic() - began < 20
