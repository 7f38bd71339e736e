"""Tools over HTTP with OpenAI's client: forced calls, text instead of calls, streams, and results sent back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from whole_service import MakeService, Service

BASE = "story"
MESSAGES: list[Any] = [{"role": "user", "content": "Once upon a time"}]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% if enable_thinking %}think {% endif %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "Finds an order",
            "parameters": {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["id"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "refund",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
STRICT: list[Any] = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
NAMED: Any = {"type": "function", "function": {"name": "find_order"}}


@pytest.fixture(scope="module")
def story(
    make_service: MakeService, stories_adapters: dict[str, Path], copy_with_template: Callable[[str], Path]
) -> Service:
    model = copy_with_template(TEMPLATE)
    dragon = {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}
    thinker = dragon | {"defaults": {"reasoning_parser": "think"}}
    return make_service(model, {"dragon": dragon, "thinker": thinker}).start()


@pytest.mark.parametrize("model", [BASE, "dragon"])
@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_forced_call_and_its_result(client: openai.OpenAI, model: str, choice: Any) -> None:
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice=choice, temperature=1, seed=5
    )
    (first,) = chat.choices
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    (call,) = first.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("find_order", "refund")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "find_order":
        assert 0 <= arguments["id"] <= 99
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"state": "sent"}'}
    after = client.chat.completions.create(
        model=model, messages=[*MESSAGES, first.message.model_dump(), result], tools=TOOLS, max_tokens=8, temperature=0
    )
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None


def test_a_stream_with_a_forced_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="dragon", messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, temperature=1, seed=2
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name == "find_order"
    assert 0 <= json.loads(call.function.arguments)["id"] <= 99
    assert final.choices[0].finish_reason == "tool_calls"


def test_text_stays_text(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="dragon", messages=MESSAGES, tools=TOOLS, tool_choice="auto", max_tokens=8, temperature=0, n=2
    )
    with client.chat.completions.stream(
        model="dragon", messages=MESSAGES, tools=TOOLS, max_tokens=8, temperature=0
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == plain.choices[0].message.content == plain.choices[1].message.content
    assert plain.choices[0].message.tool_calls is None
    strict = client.chat.completions.create(
        model="dragon", messages=MESSAGES, tools=STRICT, max_tokens=8, temperature=0
    )
    assert strict.choices[0].message.content == text, "text passes a grammar of strict tools"


def test_the_template_gets_tools_and_values(http: httpx.Client) -> None:
    def prompt_tokens(**fields: Any) -> int:
        body = {"model": "dragon", "messages": MESSAGES, "max_tokens": 1, **fields}
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens"])

    plain = prompt_tokens()
    assert prompt_tokens(tools=TOOLS) > plain
    assert prompt_tokens(tools=TOOLS, tool_choice="none") == plain
    assert prompt_tokens(tools=[], tool_choice="auto") == plain
    assert prompt_tokens(chat_template_kwargs={"enable_thinking": True}) > plain
    assert prompt_tokens(chat_template_kwargs={"enable_thinking": False}) == plain


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ""),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content", "missing"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"chat_template_kwargs": {"thinking": 1}}, "messages", "not read thinking; it reads enable_thinking, tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         "structured_outputs", "state one"),
    ],
)  # fmt: skip
def test_refusals(http: httpx.Client, fields: dict[str, Any], param: str, part: str) -> None:
    reply = http.post("/v1/chat/completions", json={"model": "dragon", "messages": MESSAGES, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert part in error["message"], error


FORCED: Any = {"grammar": 'start: "<think>" /[a-z]{3,9}/ "</think>" "yes"'}


def test_reasoning_is_apart_from_the_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    """The form forces an answer with reasoning, which a small model would not write."""
    body: dict[str, Any] = {"model": "thinker", "messages": MESSAGES, "temperature": 1, "seed": 1}
    body["structured_outputs"] = FORCED
    reply = http.post("/v1/chat/completions", json=body).json()
    message, usage = reply["choices"][0]["message"], reply["usage"]
    assert message["content"] == "yes"
    assert 3 <= len(message["reasoning_content"]) <= 9
    details = usage["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < usage["completion_tokens"]
    streamed = {"content": "", "reasoning_content": ""}
    extra = {"structured_outputs": FORCED}
    stream = client.chat.completions.create(
        model="thinker", messages=MESSAGES, temperature=1, seed=1, stream=True,
        stream_options={"include_usage": True}, extra_body=extra,
    )  # fmt: skip
    for chunk in stream:
        for choice in chunk.choices:
            for name in streamed:
                streamed[name] += getattr(choice.delta, name, None) or ""
    assert streamed == {"content": "yes", "reasoning_content": message["reasoning_content"]}
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens_details is not None
    assert chunk.usage.completion_tokens_details.reasoning_tokens == details["reasoning_tokens"]
    without = http.post("/v1/chat/completions", json=body | {"include_reasoning": False}).json()
    assert "reasoning_content" not in without["choices"][0]["message"]
    assert without["choices"][0]["message"]["content"] == "yes"
    plain = http.post("/v1/chat/completions", json=body | {"model": "dragon"}).json()
    assert "<think>" in plain["choices"][0]["message"]["content"]


def test_a_forced_tool_with_definitions_of_its_own(client: openai.OpenAI) -> None:
    """Pydantic writes the parts of a model's schema as definitions at its root."""
    age = {"type": "integer", "minimum": 0, "maximum": 9}
    parameters = {
        "type": "object",
        "properties": {"pet": {"$ref": "#/$defs/Pet"}},
        "required": ["pet"],
        "additionalProperties": False,
        "$defs": {"Pet": {"type": "object", "properties": {"age": age}, "required": ["age"],
                          "additionalProperties": False}},
    }  # fmt: skip
    tools: list[Any] = [TOOLS[0], {"type": "function", "function": {"name": "keep", "parameters": parameters}}]
    named: Any = {"type": "function", "function": {"name": "keep"}}
    chat = client.chat.completions.create(model=BASE, messages=MESSAGES, tools=tools, tool_choice=named)
    (call,) = chat.choices[0].message.tool_calls or []
    assert 0 <= json.loads(call.function.arguments)["pet"]["age"] <= 9  # type: ignore[union-attr]
    client.chat.completions.create(model=BASE, messages=MESSAGES, tools=tools, tool_choice="required")


@pytest.mark.parametrize("model", [BASE, "thinker"])
def test_a_form_after_a_prompt_that_has_opened_the_reasoning(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Once upon a time <think>"}],
        extra_body={"structured_outputs": {"choice": ["cat", "dog"]}},
    )
    assert chat.choices[0].message.content in ("cat", "dog")


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def asked_with(depth: int) -> Iterator[dict[str, Any]]:
    deep = nested(depth)
    function = {"name": "f", "arguments": json.dumps(deep)}
    yield {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}], "tool_choice": "required"}
    yield {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]}
    yield {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep, "strict": True}}]}
    yield {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": function}]}]}
    yield {"chat_template_kwargs": {"enable_thinking": deep}}
    yield {"structured_outputs": {"json": deep}}
    yield {"structured_outputs": {"json": json.dumps(deep)}}
    yield {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": deep}}}


@pytest.mark.parametrize("depth", [100, 300, 450, 900])
def test_deep_values_are_served_or_refused(http: httpx.Client, depth: int) -> None:
    for more in asked_with(depth):
        try:
            body = json.dumps({"model": BASE, "messages": MESSAGES, "max_tokens": 2, **more})
        except RecursionError:
            continue
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (answer.text, list(more))


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "self", "context", "caller", "m"])
def test_no_value_takes_the_place_of_the_templates_own(http: httpx.Client, name: str) -> None:
    body = {"model": BASE, "messages": MESSAGES, "max_tokens": 2, "chat_template_kwargs": {name: [{"content": "x"}]}}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
