"""/v1, mostly through the official client as its users have it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import openai
import pytest
from running_gateway import Running
from stub_node import StubNode, done, hang_before_first, timing

from cluster.messages import Done, Event, GenerateRequest, Started, Token, TokenLogprob, TopLogprob
from gateway.api.openai_schema import Chat
from gateway.calls.openai_reply import Head, full_reply
from gateway.calls.reply import Outcome


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture
def client(gateway: Running, pirate: dict) -> Iterator[openai.OpenAI]:
    assert gateway.client().post("/deploy/pirate", files=pirate).status_code == 201
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys["acme"], max_retries=0) as made:
        yield made


def test_lists_and_gets_models(client: openai.OpenAI, gateway: Running) -> None:
    assert [model.id for model in client.models.list()] == ["stories260K", "pirate"]
    assert client.models.retrieve("pirate").owned_by == gateway.tenants["acme"]
    base, pirate = (model.model_dump() for model in client.models.list())
    assert (base["root"], base["parent"], base["max_model_len"]) == ("stories260K", None, 512)
    assert (pirate["root"], pirate["parent"], pirate["max_model_len"]) == ("pirate", "stories260K", 512)
    assert client.models.retrieve("pirate:latest").model_dump()["root"] == "pirate"
    assert client.models.retrieve("pirate:latest").id == "pirate:latest"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_completes(client: openai.OpenAI, gateway: Running) -> None:
    reply = client.completions.create(
        model="pirate", prompt="Once", max_tokens=3, seed=-1, stop=["xyz"], user="someone", logprobs=2
    )
    assert reply.choices[0].text == " t0 t1 t2"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 3 + reply.usage.prompt_tokens)
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.tokens == [" t0", " t1", " t2"]
    assert reply.choices[0].logprobs.text_offset == [0, 3, 6]
    asked = gateway.nodes[0].received[0]
    assert asked.adapter is not None
    assert asked.stop == ["xyz"]
    assert asked.sampling.seed == (1 << 63) - 1
    assert asked.sampling.logprobs == 2


def test_completes_with_the_base(client: openai.OpenAI, gateway: Running) -> None:
    assert client.completions.create(model="stories260K", prompt="Once").choices[0].text.startswith(" t0")
    assert gateway.nodes[0].received[0].adapter is None


def test_streams_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="pirate", prompt="Once", max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " t0 t1 t2 t3"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None] * 4 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("include_usage", [True, False])
def test_each_chunk_has_the_usage_so_far(client: openai.OpenAI, gateway: Running, include_usage: bool) -> None:
    """As vLLM has it: without `include_usage` the other option has no effect."""
    options: dict = {"include_usage": include_usage, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="pirate", prompt=["One", "Two"], max_tokens=2, stream=True, stream_options=options
        )
    )
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    if not include_usage:
        assert usages == []
        return
    assert len(usages) == len(chunks)
    prompt = sum(len(asked.token_ids) for asked in gateway.nodes[0].received)
    assert {usage.prompt_tokens for usage in usages} == {prompt}
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 4)


def test_keep_alives_are_blank_lines(start: Callable[..., Running]) -> None:
    """A client that strips each piece of the stream joins a comment to the event after it."""
    running = start(header_seconds=0.05, keepalive_seconds=0.05)
    node = running.node(hang_before_first)
    body = {"model": "stories260K", "prompt": "x", "stream": True}
    with running.client().stream("POST", "/v1/completions", json=body) as reply:
        pieces = reply.iter_bytes()
        assert next(pieces).strip() == b""
        node.go_on.set()
        rest = b"".join(pieces)
    assert rest.strip().startswith(b"data: {")
    assert b"\n:" not in rest


def test_several_choices_and_prompts(client: openai.OpenAI, gateway: Running) -> None:
    reply = client.completions.create(model="pirate", prompt=["One", "Two, three"], n=2, max_tokens=2, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    received = sorted(gateway.nodes[0].received, key=lambda asked: asked.id)
    assert [asked.sampling.choice for asked in received] == [0, 1, 0, 1]
    assert {asked.sampling.seed for asked in received} == {7}
    assert len({asked.id for asked in received}) == 4
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(received[0].token_ids) + len(received[2].token_ids)
    assert reply.usage.completion_tokens == 8


def test_streams_several_choices(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(model="pirate", prompt="One", n=3, max_tokens=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert set(texts.values()) == {" t0 t1 t2"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"n": 16, "prompt": ["a", "b", "c", "d", "e"]}, "n"),
        ({"temperature": -3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"extra_body": {"echo": 0}}, "echo"),
        ({"prompt": "word " * 600}, "prompt"),
    ],
)
def test_refuses_with_400_and_param(client: openai.OpenAI, fields: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "pirate", "prompt": "Once", **fields})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_objects"}}, "response_format.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({}, "messages"),
    ],
)
def test_chat_refuses_with_400_and_param(client: openai.OpenAI, fields: dict, param: str) -> None:
    """The last row: stories260K has no chat template."""
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "pirate", "messages": messages, **fields})
    assert caught.value.param == param


def test_wrong_key_and_unknown_model(client: openai.OpenAI, gateway: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="gsk_acme_nonsense").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    other = client.with_options(api_key=gateway.keys["other"])
    with pytest.raises(openai.NotFoundError):
        other.completions.create(model="pirate", prompt="x")
    assert [model.id for model in other.models.list()] == ["stories260K"]


async def halves(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """A character of two tokens, and text that is held back for a possible stop string."""
    yield Started(node=node.node_id, cold_start="none")
    pieces = [
        ("a", "a", 0, b""), ("", "\ufffd", 1, b"\xc3"), ("\u00e9", "\ufffd", 1, b"\xa9"),
        ("", " st", 2, b""), ("", "o", 5, b""), (" stone", "ne", 6, b""),
    ]  # fmt: skip
    for index, (text, named, offset, part) in enumerate(pieces):
        top = [TopLogprob(token=named, token_id=index, logprob=-0.5, part=part)]
        entries = [TokenLogprob(token=named, token_id=index, logprob=-0.5, top=top, offset=offset, part=part)]
        yield Token(text=text, token_ids=[index], index=index, logprobs=entries)
    yield done(asked, len(pieces))


def test_offsets_and_bytes_of_tokens(start: Callable[..., Running]) -> None:
    running = start()
    running.node(halves)
    client = running.stack.enter_context(
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.keys["acme"], max_retries=0)
    )
    complete = client.completions.create(model="stories260K", prompt="x", logprobs=1).choices[0].logprobs
    assert complete is not None
    assert complete.text_offset == [0, 1, 1, 2, 5, 6], "two tokens of a character have one offset"
    stream = client.completions.create(model="stories260K", prompt="x", logprobs=1, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in stream]
    assert [offset for part in streamed if part for offset in part.text_offset or []] == complete.text_offset


def test_half_a_character_has_its_bytes() -> None:
    entries = [
        TokenLogprob(token=named, token_id=1, logprob=-0.5, part=part)
        for named, part in (("\u00e9", b""), ("\ufffd", b"\xc3"))
    ]
    outcome = Outcome("x", entries, Done("stop", 1, 2, 0, timing()))
    reply = full_reply(Head("i", "m", chat=True, logprobs=True, include_usage=False, choices=1), [outcome])
    assert isinstance(reply, Chat)
    assert reply.choices[0].logprobs is not None
    assert [entry.bytes for entry in reply.choices[0].logprobs.content] == [[0xC3, 0xA9], [0xC3]]
