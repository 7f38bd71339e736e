"""Checks of structured output's forms: bounded in time and memory, whatever the form."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from cluster.errors import ServiceError
from cluster.messages import Grammar
from gateway.calls import grammars
from gateway.calls.grammars import GrammarChecks, StatedForm
from gateway.calls.setbacks import FIRST_PAUSE_S
from gateway.places.places import Places, Pool

GOOD = Grammar("json", '{"type": "integer"}')
DEFINITIONS = {
    f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{(i + 1) % 300}"}, "b": {"pattern": "^[a-z]{0,300}$"}}}
    for i in range(300)
}
PROPERTIES = {f"q{i}": {"$ref": "#/$defs/d0"} for i in range(490)}


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarChecks]:
    monkeypatch.setattr(grammars, "ANSWER_SECONDS", 200.0)  # a busy host gives a process of low priority little
    with closing(GrammarChecks(Places(Pool(name="forms", work="forms", size=4, per_tenant=1)))) as made:
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
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

    async def check() -> None:
        evil = StatedForm("structured_outputs.json", Grammar("json", text))
        with pytest.raises(ServiceError, match=why) as first:
            await checks.check("bad", evil, time.monotonic() + 300)
        assert first.value.type == "validation_failed"
        with pytest.raises(ServiceError, match=why) as second:
            await checks.check("bad", evil, time.monotonic() + 300)
        if "takes more" in why:
            assert second.value.type == "overloaded"
            assert 0 < (second.value.retry_after or 0) <= FIRST_PAUSE_S
            with pytest.raises(ServiceError, match=why) as other:
                await checks.check("other", evil, time.monotonic() + 300)
            assert other.value.type == "validation_failed", "one tenant's pause is not another's"
        await checks.check("bad", StatedForm("structured_outputs.json", GOOD), time.monotonic() + 300)

    asyncio.run(check())
    checks.close()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 20
