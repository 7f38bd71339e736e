"""Chat completions over a base that has a template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from running_gateway import Running, start_gateway

from cluster.text import BaseText

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ raise_exception('no') if fail }}"


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
