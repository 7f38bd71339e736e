"""Requests and replies without a service."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from garnish.calls import invoke_call
from garnish.credentials import Connection
from garnish.errors import GarnishError
from garnish.protocol import EventReader, base_headers, error_of, parse
from gateway.api.schema import TokenEvent
from gateway.routes.functions import FunctionList

DONE = {
    "id": "inv_1",
    "function": "f",
    "version": 1,
    "digest": "d",
    "output": {"finish_reason": "stop"},
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0},
    "timing": {
        "queue_ms": 0,
        "cold_start": {"state": "none", "plan": "none", "load_ms": 0, "exposed_ms": 0},
        "ttft_ms": None,
        "tpot_ms": None,
        "total_ms": 1,
    },
    "node": "n",
    "cold_start": "none",
    "server_timing": "",
}
ERROR = {"error": {"type": "overloaded", "message": "full", "param": None, "request_id": "r", "details": [{"x": 1}]}}


def sse(name: str, data: Any) -> list[str]:
    return [f"event: {name}", f"data: {json.dumps(data)}", ""]


def read(lines: list[str]) -> list[Any]:
    reader = EventReader()
    events = [event for event in map(reader.feed_line, lines) if event is not None]
    reader.end()
    return events


@given(st.lists(st.text(max_size=20), max_size=10))
def test_texts_come_through_events(texts: list[str]) -> None:
    lines = [": keep alive", ""]
    for index, text in enumerate(texts):
        lines += sse("token", {"text": text, "index": index, "token_id": 5})
    *tokens, done = read([*lines, *sse("done", DONE)])
    assert [token.text for token in tokens] == texts
    assert done.output.finish_reason == "stop"


def test_error_event_and_broken_stream() -> None:
    token = sse("token", {"text": "a", "index": 0, "token_id": 1})
    with pytest.raises(GarnishError) as refused:
        read([*token, *sse("error", ERROR)])
    assert (refused.value.type, refused.value.request_id, refused.value.details) == ("overloaded", "r", [{"x": 1}])
    with pytest.raises(GarnishError, match="before its `done`"):
        read(token)


HERE = Connection("http://here:1", "key", key_from="GARNISH_API_KEY")


def answer(status: int, **content: Any) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "http://here:1/functions?limit=1"), **content)


def test_a_refused_key_is_named() -> None:
    reply = answer(401, json={"error": {**ERROR["error"], "type": "unauthenticated"}})
    assert "full (the one that was sent: GARNISH_API_KEY)" in error_of(reply, HERE).report()
    without = error_of(reply, Connection("http://here:1", "")).report()
    assert "none is known for http://here:1: set GARNISH_API_KEY" in without


@pytest.mark.parametrize("key", ["gsk_demo_…", "gsk\nx", "ключ"])
def test_a_key_that_no_header_can_carry_is_named(key: str) -> None:
    with pytest.raises(GarnishError, match=r"copy it whole .the one that was sent: GARNISH_API_KEY"):
        base_headers(Connection("http://here:1", key, key_from="GARNISH_API_KEY"))
    with pytest.raises(GarnishError, match="there is no tenant"):
        base_headers(Connection("http://here:1", "key", key))


def test_error_replies() -> None:
    error = error_of(answer(429, json=ERROR, headers={"retry-after": "3"}), HERE)
    assert (error.status, error.type, error.retry_after, str(error)) == (429, "overloaded", 3.0, "overloaded: full")
    foreign = error_of(answer(502, text="<html>"), HERE)
    assert str(foreign).startswith("internal: http://here:1 answered 502, but not as a Garnish service does")
    with pytest.raises(GarnishError, match="can't be decoded"):
        parse(answer(200, text="{"), FunctionList, HERE)


def test_report_tells_one_problem_once() -> None:
    details = [{"check": "rank", "problem": "too large", "expected": "1 to 128", "found": "256"}]
    error = GarnishError("validation_failed", "the adapter is refused: rank: too large", details=details)
    assert error.report() == f"{error} (expected 1 to 128, found 256)"


def test_report_lists_the_details() -> None:
    details = [{"tensor": f"t{n}", "problem": "shape", "expected": "[8, 4]", "found": "[8, 5]"} for n in range(30)]
    lines = GarnishError("validation_failed", "refused", details=details).report().splitlines()
    assert lines[:2] == ["validation_failed: refused", "  t0: shape (expected [8, 4], found [8, 5])"]
    assert lines[-1] == "  and 10 more"


def test_fields_of_a_newer_service_are_no_error() -> None:
    reply = httpx.Response(200, json={"text": "a", "index": 0, "token_id": None, "new": 1})
    assert parse(reply, TokenEvent, HERE).text == "a"


def test_the_client_waits_longer_than_the_service() -> None:
    assert (invoke_call("f", "x", False, {}).timeout.read or 0) > 600
    assert (invoke_call("f", "x", False, {"timeout": 3600}).timeout.read or 0) > 3600


def test_invoke_call() -> None:
    call = invoke_call("f:prod", "hello", True, {"max_tokens": 5, "seed": None})
    assert (call.url, call.json) == ("/invoke/f:prod", {"prompt": "hello", "max_tokens": 5, "stream": True})
    assert invoke_call("../x y", [{"role": "user", "content": "x"}], False, {}).url == "/invoke/..%2Fx%20y"
