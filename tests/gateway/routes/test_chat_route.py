"""Chat completions over a base that has a template."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from running_gateway import Running, start_gateway
from stub_node import StubNode, done

from cluster.messages import Event, GenerateRequest, Grammar, Started, Token
from cluster.text import BaseText

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content if 'hidden' not in m.content }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '!' }}{{ raise_exception('no') if fail }}"
)
SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
CALL = '<tool_call>\n{"name": "find", "arguments": {"id": 4}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared_gateway(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("chatty")
    model = folder / "model"
    shutil.copytree(stories_dir, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        running = start_gateway(stack, model, folder)
        running.node()
        yield running


@pytest.fixture
def chatty(reused: Running) -> Running:
    return reused


@pytest.fixture
def client(chatty: Running) -> openai.OpenAI:
    return chatty.stack.enter_context(
        openai.OpenAI(base_url=f"{chatty.url}/v1", api_key=chatty.keys["acme"], max_retries=0)
    )


def test_chats_with_the_base(client: openai.OpenAI, chatty: Running) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    reply = client.chat.completions.create(
        model="stories260K",
        messages=[{"role": "developer", "content": "Be"}, {"role": "user", "content": parts}],
        max_completion_tokens=2,
        logprobs=True,
        top_logprobs=2,
        store=True,
    )
    assert reply.choices[0].message.content == " t0 t1"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].logprobs is not None
    assert [entry.token for entry in reply.choices[0].logprobs.content or []] == [" t0", " t1"]
    text = BaseText(Path(chatty.config.model_dir))
    expected = text.encode_chat([{"role": "system", "content": "Be"}, {"role": "user", "content": "Hello"}])
    assert chatty.nodes[0].received[0].token_ids == expected


def test_streams_a_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="stories260K", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " t0 t1 t2"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_an_earlier_reply_can_be_sent_back(client: openai.OpenAI) -> None:
    messages: list = [{"role": "user", "content": "Hi"}]
    reply = client.chat.completions.create(model="stories260K", messages=messages, max_tokens=2)
    messages += [reply.choices[0].message, {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model="stories260K", messages=messages, max_tokens=2).choices


def test_native_messages(chatty: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    reply = chatty.client().post("/invoke/stories260K", json=body)
    assert reply.status_code == 200
    assert reply.json()["output"]["text"] == " t0 t1"
    assert reply.json()["version"] is None


def test_a_long_conversation_is_too_long(chatty: Running) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 3000}]}
    reply = chatty.client().post("/invoke/stories260K", json=body)
    assert reply.status_code == 422
    assert reply.json()["error"]["param"] == "messages"


def tool(schema: dict[str, Any] | None = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "parameters": schema, **fields}}


async def call_tool(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    yield Token(text=CALL, token_ids=[5], index=0)
    yield done(asked, 1, "stop")


def sent_form(chatty: Running, **fields: Any) -> tuple[Grammar | None, dict[str, Any]]:
    """Returns the form that the node has got, and the answer's message."""
    chatty.nodes[0].script = call_tool
    body = {"model": "stories260K", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, **fields}
    reply = chatty.client().post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return chatty.nodes[0].received[-1].sampling.grammar, reply.json()["choices"][0]["message"]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_a_strict_tool_is_a_form_that_lets_text_pass(chatty: Running, choice: str | None) -> None:
    other = tool(strict=False)
    other["function"]["name"] = "other"
    grammar, message = sent_form(chatty, tools=[other, tool(strict=True)], tool_choice=choice)
    assert grammar is not None
    assert grammar.kind == "lark"
    assert all(part in grammar.text for part in ("<tool_call>", '"find"', '"other"', '"integer"'))
    assert message["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"id": 4}'}


def test_tools_that_are_not_strict_are_no_form(chatty: Running) -> None:
    for fields in ({"tools": [tool()]}, {"tools": [tool(strict=True)], "tool_choice": "none"}):
        assert sent_form(chatty, **fields)[0] is None


def test_an_answer_of_a_stated_form_has_no_calls(chatty: Running) -> None:
    grammar, message = sent_form(chatty, tools=[tool(strict=True)], response_format={"type": "json_object"})
    assert grammar == Grammar("json", '{"type": "object"}')
    assert "tool_calls" not in message
    assert message["content"] == CALL


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        (SCHEMA | {"properties": {"id": {"type": "array", "uniqueItems": True}}}, "at /properties/id: Unimplemented"),
        ({"type": "array"}, "the arguments of a strict tool are an object"),
        ({"properties": {"id": {"enum": ["x" * 70_000]}}}, "characters"),
    ],
)
def test_strict_tools_that_cannot_be_kept_are_refused(chatty: Running, schema: dict[str, Any], part: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool(strict=True), tool(schema, strict=True)]}
    body["tools"][0]["function"]["name"] = "other"
    reply = chatty.client().post("/v1/chat/completions", json={"model": "stories260K", **body})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert part in error["message"]


def test_where_the_prompt_ends(chatty: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, "}]
    text = BaseText(Path(chatty.config.model_dir))
    for fields, expected in [
        ({}, "<user>Hi<assistant>Hello, <assistant>"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "<user>Hi<assistant>Hello, <assistant>"),
        ({"add_generation_prompt": False}, "<user>Hi<assistant>Hello, !"),
        ({"continue_final_message": True}, "<user>Hi<assistant>Hello, "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<user>Hi<assistant>Hello, "),
    ]:
        sent_form(chatty, messages=messages, **fields)
        assert chatty.nodes[0].received[-1].token_ids == text.encode_plain(expected), fields


@pytest.mark.parametrize(
    ("message", "fields", "param"),
    [
        ({"content": "x"}, {"add_generation_prompt": True}, "continue_final_message"),
        ({"tool_calls": [{"function": {"name": "find"}}]}, {}, "messages[1].content"),
        ({"content": "hidden"}, {}, "messages"),
    ],
)
def test_messages_that_cannot_be_continued(
    chatty: Running, message: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", **message}]
    body = {"model": "stories260K", "messages": messages, "continue_final_message": True, **fields}
    reply = chatty.client().post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
