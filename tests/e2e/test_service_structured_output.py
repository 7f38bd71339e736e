"""Structured output over HTTP on all routes, as clients ask for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from whole_service import MakeService, Service, eventually

BASE = "story"
PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["animal", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


class Pet(BaseModel):
    animal: Literal["cat", "dog"]
    names: list[str]


@pytest.fixture(scope="module")
def story(
    make_service: MakeService, stories_adapters: dict[str, Path], copy_with_template: Callable[[str], Path]
) -> Service:
    model = copy_with_template(TEMPLATE)
    return make_service(model, {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}).start()


def assert_form(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("model", [BASE, "dragon"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_openai_client(client: openai.OpenAI, model: str, temperature: float) -> None:
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, response_format=FORMAT, temperature=temperature, n=3, logprobs=True
    )
    assert len(chat.choices) == 3
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        assert_form(choice.message.content or "")
        assert choice.logprobs is not None
        assert "".join(each.token for each in choice.logprobs.content or []).strip() == choice.message.content


def test_openai_client_parses_a_pydantic_model(client: openai.OpenAI) -> None:
    """It raises an error of its own for an answer that its limit has ended, which a small model may write."""
    try:
        chat = client.chat.completions.parse(model="dragon", messages=MESSAGES, response_format=Pet, seed=1)
    except openai.LengthFinishReasonError:
        return
    assert isinstance(chat.choices[0].message.parsed, Pet)


def test_a_stream_of_the_openai_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="dragon", messages=MESSAGES, response_format=FORMAT, seed=4) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert_form(text)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, "ab+c?"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"structured_outputs": {"json": '{"const": 7}'}}, "7"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/invoke/dragon"])
def test_each_form_on_each_route(http: httpx.Client, form: dict[str, Any], pattern: str, route: str) -> None:
    body = {"max_tokens": 20, "temperature": 1, "seed": 3, **form}
    body |= {"messages": MESSAGES} if "chat" in route else {"prompt": PROMPT}
    reply = http.post(route, json=body if route.startswith("/invoke") else body | {"model": "dragon"})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0] if route.startswith("/v1") else reply.json()["output"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert re.fullmatch(pattern, text.strip(), re.DOTALL), text


def test_an_asynchronous_call_keeps_its_form(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "structured_outputs": {"choice": ["left", "right"]}, "background": True}
    reply = http.post("/invoke/dragon", json=body)
    assert reply.status_code == 202, reply.text
    place = f"/invocations/{reply.json()['id']}"
    assert eventually(lambda: http.get(place).json()["state"] == "succeeded"), http.get(place).text
    assert http.get(place).json()["result"]["output"]["text"].strip() in ("left", "right")


@pytest.mark.parametrize(
    ("form", "param", "part"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
                "type": "object", "properties": {"a": {"type": "array", "items": {"not": {"type": "string"}}}}}}}},
            "response_format", "at /properties/a/items: Unimplemented keys",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs", "structured_outputs.grammar"),
        ({"structured_outputs": {}}, "structured_outputs", "state one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "state one"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "null"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "structured_outputs", "state one"),
        ({"structured_outputs": {"json": {"enum": ["x" * 70_000]}}}, "structured_outputs", "characters"),
        ({"guided_json": {}}, "guided_json", "use structured_outputs"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(http: httpx.Client, form: dict[str, Any], param: str, part: str) -> None:
    reply = http.post("/v1/completions", json={"model": "dragon", "prompt": PROMPT, **form})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith(param), error
    assert part in error["message"], error
