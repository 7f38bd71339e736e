"""Codes of errors on /v1, by which clients choose what to do; native routes keep the service's own types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest
from running_gateway import Running, plain_client

from cluster.errors import STATUS
from gateway.http.openai_codes import BY_TYPE

DOCS = Path(__file__).parents[3] / "docs" / "guide" / "errors.md"


@pytest.fixture
def gateway(reused: Running, pirate: dict[str, Any]) -> Running:
    reused.client().post("/deploy/pirate", files=pirate).raise_for_status()
    return reused


MODEL = {"model": "stories260K", "prompt": "x"}
CHAT = {"model": "stories260K", "messages": [{"role": "user", "content": "x"}]}
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {**MODEL, "surprise": 1}, "unknown_parameter"),
    ("chat/completions", {"model": "stories260K", "messages": [{"role": "user", "size": 1}]}, "unknown_parameter"),
    ("completions", {"model": "stories260K"}, "missing_required_parameter"),
    ("completions", {**MODEL, "max_tokens": "3"}, "invalid_type"),
    ("completions", {**MODEL, "n": 17}, "integer_above_max_value"),
    ("completions", {**MODEL, "n": 0}, "integer_below_min_value"),
    ("completions", {**MODEL, "top_p": 1.5}, "decimal_above_max_value"),
    ("completions", {**MODEL, "min_p": -0.5}, "decimal_below_min_value"),
    ("completions", {**MODEL, "stop": ["x"] * 17}, "array_above_max_length"),
    ("chat/completions", {**CHAT, "messages": []}, "empty_array"),
    ("completions", {**MODEL, "model": "x" * 513}, "string_above_max_length"),
    ("completions", {**MODEL, "model": ""}, "empty_string"),
    ("chat/completions", {**CHAT, "tool_choice": "perhaps"}, "invalid_value"),
    ("completions", {**MODEL, "logit_bias": {"999999": 1}}, "invalid_value"),
    ("completions", {**MODEL, "best_of": 3}, "unsupported_parameter"),
    ("chat/completions", {**CHAT, "messages": [{"role": "function", "content": "x"}]}, "unsupported_value"),
    ("completions", {**MODEL, "prompt": "x" * 900_000}, "context_length_exceeded"),
    ("completions", {**MODEL, "prompt": [1] * 600}, "context_length_exceeded"),
    ("completions", {**MODEL, "prompt": [1] * 512}, "context_length_exceeded"),
    ("completions", {**MODEL, "max_tokens": 10_000}, "context_length_exceeded"),
    ("completions", {**MODEL, "model": "nobody"}, "model_not_found"),
    ("completions", {**MODEL, "model": "pirate:9"}, "model_not_found"),
    ("completions", {**MODEL, "model": "pirate:nowhere"}, "model_not_found"),
    ("nowhere", MODEL, "unknown_url"),
]


def test_codes_are_openais_where_it_has_one(gateway: Running) -> None:
    client = gateway.client()
    for route, body, code in CALLS:
        error = client.post(f"/v1/{route}", json=body).json()["error"]
        assert error["code"] == code, (route, body, error)
        assert error["type"] == "invalid_request_error"
    assert client.get("/v1/models/nobody").json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/models?page=2").json()["error"]["code"] == "unknown_parameter"
    assert gateway.client(None).get("/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_native_routes_keep_their_types(gateway: Running) -> None:
    client = gateway.client()
    for fields, kind in (({"surprise": 1}, "validation_failed"), ({"max_tokens": 10_000}, "validation_failed")):
        error = client.post("/invoke/pirate", json={"prompt": "x", **fields}).json()["error"]
        assert (error["type"], "code" in error) == (kind, False)
    error = client.post("/invoke/nobody", json={"prompt": "x"}).json()["error"]
    assert (error["type"], error["message"]) == ("not_found", "there is no function 'nobody'")


def test_the_sentences_that_frameworks_look_for(gateway: Running) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys["acme"], max_retries=0) as client:
        for prompt, max_tokens, says in (
            ([1] * 600, 12, "you requested 612 tokens (600 in the prompt, 12 in the completion). Please reduce the "),
            ([1] * 512, None, "you requested 513 tokens (512 in the prompt, 1 in the completion). Please reduce the "),
            ([1] * 500, 13, "you requested 513 tokens (500 in the prompt, 13 in the completion). Please reduce the "),
            ("x" * 900_000, None, "your prompt resulted in more than that. Please reduce the length of the prompt."),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="pirate", prompt=prompt, max_tokens=max_tokens)  # type: ignore[call-overload]
            assert caught.value.code == "context_length_exceeded"
            assert "This model's maximum context length is 512 tokens. However, " in str(caught.value)
            assert says in str(caught.value)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="pirat", prompt="x")
        says = "The model `pirat` does not exist or you do not have access to it."
        assert f"{says} (there is no function 'pirat'; did you mean 'pirate'?)" in str(unknown.value)


def test_the_page_lists_every_code(gateway: Running) -> None:
    """One table: types with their statuses, and what /v1 has in their place."""
    page = DOCS.read_text()
    listed = set(re.findall(r"`([a-z_]+)`", page))
    assert {code for _, _, code in CALLS} | set(BY_TYPE.values()) | set(STATUS) <= listed
    with plain_client(gateway.url) as client:
        assert client.get("/v1").json()["error"]["code"] == "unknown_url"
