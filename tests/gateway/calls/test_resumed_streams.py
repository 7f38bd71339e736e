"""Nodes that die after the first token: the call goes on elsewhere, and only `timing.resumed` tells."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx_sse
import pytest
from running_gateway import Running, until, until_received
from stub_node import Cut, StubNode, die_at_once, die_behind, done, echo, refuse, token

from cluster.messages import (
    Event,
    Failed,
    GenerateRequest,
    PromptLogprobs,
    Started,
    TokenLogprob,
)
from cluster.text import BaseText

CALL = {"prompt": "x", "max_tokens": 5, "seed": 7, "repetition_penalty": 1.1, "stop": ["never"]}
PATH = "/invoke/stories260K"


def streamed(running: Running, **call: Any) -> list[httpx_sse.ServerSentEvent]:
    with httpx_sse.connect_sse(running.client(), "POST", PATH, json={**CALL, "stream": True, **call}) as source:
        return list(source.iter_sse())


def counts(running: Running) -> tuple[int, int, int]:
    """What acme is to pay for: requests, tokens of prompts and of answers."""
    total = running.client().get("/usage").json()["total"]
    return total["requests"], total["prompt_tokens"], total["completion_tokens"]


def generated(*nodes: StubNode) -> list[list[list[int]]]:
    return [[asked.generated for asked in node.received] for node in nodes]


def test_a_stream_goes_on_where_it_was_cut(start: Callable[..., Running]) -> None:
    running = start()
    first, second = running.node(die_behind, "a-dies"), running.node(echo, "b-other")
    *tokens, last = streamed(running)
    assert [event.json()["text"] for event in tokens] == [f" t{index}" for index in range(5)]
    assert [(event.json()["index"], event.json()["token_id"]) for event in tokens] == [(i, 100 + i) for i in range(5)]
    said = last.json()
    assert (last.event, said["node"], said["timing"]["resumed"]) == ("done", "b-other", 1)
    assert said["output"] == {"finish_reason": "length"}
    asked, again = first.received[0], second.received[0]
    assert (again.generated, again.ttft) == ([100], None)
    same = ("id", "base", "tenant", "token_ids", "max_tokens", "sampling", "adapter", "stop", "function", "weight")
    assert all(getattr(asked, field) == getattr(again, field) for field in same)
    assert said["usage"]["completion_tokens"] == 5
    assert counts(running) == (1, said["usage"]["prompt_tokens"], 5)
    explained = running.client().get(f"/explain/{said['id']}").json()["decisions"]
    assert [entry["decision"]["node"] for entry in explained] == ["a-dies", "b-other"]
    assert explained[1]["decision"]["excluded"] == ["a-dies"]


def test_a_whole_reply_goes_on_where_it_was_cut(start: Callable[..., Running]) -> None:
    running = start()
    nodes = running.node(die_behind, "a-dies"), running.node(die_behind, "b-dies"), running.node(echo, "c-other")
    reply = running.client().post(PATH, json={**CALL, "logprobs": 1})
    assert (reply.status_code, reply.headers["x-garnish-node"]) == (200, "c-other")
    said = reply.json()
    assert said["output"]["text"] == " t0 t1 t2 t3 t4" and said["timing"]["resumed"] == 2
    assert [entry["token_id"] for entry in said["output"]["logprobs"]] == [100, 101, 102, 103, 104]
    assert generated(*nodes) == [[[]], [[100]], [[100, 101]]]


def test_undisturbed_calls_are_not_resumed(reused: Running) -> None:
    assert reused.client().post(PATH, json=CALL).json()["timing"]["resumed"] == 0


def test_the_third_cut_is_an_error(start: Callable[..., Running]) -> None:
    running = start()
    nodes = [running.node(die_behind, f"{name}-dies") for name in "abc"]
    nodes.append(running.node(echo, "d-good"))
    *tokens, last = streamed(running)
    assert [event.json()["text"] for event in tokens] == [" t0", " t1", " t2"]
    assert (last.event, last.json()["error"]["type"]) == ("error", "node_failed")
    assert generated(*nodes) == [[[]], [[100]], [[100, 101]], []]


@pytest.mark.parametrize("script", [die_at_once, refuse])
def test_a_node_that_does_not_take_it_up_counts_as_a_cut(start: Callable[..., Running], script: Any) -> None:
    running = start()
    nodes = running.node(die_behind, "a-dies"), running.node(script, "b-bad"), running.node(echo, "c-good")
    reply = running.client().post(PATH, json=CALL)
    assert (reply.json()["output"]["text"], reply.json()["timing"]["resumed"]) == (" t0 t1 t2 t3 t4", 2)
    assert generated(*nodes) == [[[]], [[100]], [[100]]]


def failing(type: str) -> Any:
    async def script(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
        yield Started(node=node.node_id, cold_start="none")
        yield token(0, " t0")
        yield Failed(type=type, message="as a node says it after a token")

    return script


@pytest.mark.parametrize(
    ("type", "goes_on"), [("node_failed", True), ("unavailable", True), ("internal", False), ("timeout", False)]
)
def test_what_a_node_says_of_its_failure(start: Callable[..., Running], type: str, goes_on: bool) -> None:
    """Its engine has died, or the request has: that would fail elsewhere, too."""
    running = start()
    running.node(failing(type), "a-fails")
    other = running.node(echo, "b-other")
    last = streamed(running)[-1]
    assert last.event == ("done" if goes_on else "error")
    assert generated(other) == [[[100]] if goes_on else []]


async def cut_second_choice(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    for index in range(2):
        yield token(index, f" t{index}")
    if asked.sampling.choice:
        await node.until(node.go_on)
        raise Cut
    yield done(asked, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_only_unfinished_choices_go_on(start: Callable[..., Running], stream: bool) -> None:
    running = start()
    first = running.node(cut_second_choice, "a-dies")
    second = running.node(echo, "b-other", publish=False)
    with ThreadPoolExecutor(1) as pool:
        call = {**CALL, "n": 2, "max_tokens": 4, "stream": stream}
        calling = pool.submit(running.client().post, PATH, json=call)
        until_received(first, 2, [calling])
        second.publish(running.url)
        first.go_on.set()
        reply = calling.result(60)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
        said = events.pop()
        texts = ["".join(event["text"] for event in events if event["choice"] == choice) for choice in range(2)]
    else:
        said = reply.json()
        texts = [output["text"] for output in said["outputs"]]
    assert texts == [" t0 t1", " t0 t1 t2 t3"]
    assert said["timing"]["resumed"] == 1 and said["usage"]["completion_tokens"] == 6
    assert [(asked.sampling.choice, asked.generated) for asked in second.received] == [(1, [100, 101])]
    assert counts(running) == (1, said["usage"]["prompt_tokens"], 6)


async def scored_then_cut(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    yield PromptLogprobs(1, [TokenLogprob("x", 403, -0.5, rank=2)])
    yield token(0, " t0", asked.sampling.logprobs)
    raise Cut


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_scored_once(start: Callable[..., Running], stream: bool) -> None:
    running = start()
    running.node(scored_then_cut, "a-dies")
    other = running.node(echo, "b-other")
    body = {"model": "stories260K", "prompt": [1, 403], "max_tokens": 3, "echo": True, "logprobs": 1}
    if stream:
        with httpx_sse.connect_sse(
            running.client(), "POST", "/v1/completions", json={**body, "stream": True}
        ) as source:
            choices = [event.json()["choices"][0] for event in source.iter_sse() if event.data != "[DONE]"]
    else:
        choices = running.client().post("/v1/completions", json=body).json()["choices"]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [name for entry in told for name in entry["tokens"]]
    offsets = [offset for entry in told for offset in entry["text_offset"]]
    assert tokens[-4:] == ["x", " t0", " t1", " t2"] and len(tokens) == 5
    begin = len(BaseText(Path(running.config.model_dir)).tokenizer.decode([1, 403]))
    assert offsets == [0, 0, begin, begin + 3, begin + 6], "the first token has no text"
    assert other.received[0].sampling.prompt_logprobs is None


def test_limits_are_charged_once(start: Callable[..., Running]) -> None:
    """Of two generations at once a call that goes on takes one; and none is left taken."""
    running = start()
    admin = running.client("admin")
    limits = {"concurrent": 1, "rps": 100.0, "tokens_per_minute": 4000}
    admin.put(f"/tenants/{running.tenants['acme']}", json={"limits": limits}).raise_for_status()
    running.node(die_behind, "a-dies")
    running.node(echo, "b-other")
    for _ in range(3):
        reply = running.client().post(PATH, json=CALL)
        assert reply.status_code == 200, reply.text


def test_a_caller_who_leaves_a_resumed_call_pays_for_its_prompt_once(start: Callable[..., Running]) -> None:
    async def hang_behind(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
        yield token(1, " t1")  # it has not even said that it began
        await node.until(node.go_on)

    running = start()
    running.node(die_behind, "a-dies")
    running.node(hang_behind, "b-hangs")
    with httpx_sse.connect_sse(running.client(), "POST", PATH, json={**CALL, "stream": True}) as source:
        events = source.iter_sse()
        assert [next(events).json()["text"] for _ in range(2)] == [" t0", " t1"]
    wanted = 1, len(running.nodes[0].received[0].token_ids), 2
    until(lambda: counts(running) != (0, 0, 0))
    assert counts(running) == wanted
