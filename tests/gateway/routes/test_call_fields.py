"""Fields of vLLM's clients: what reaches the node, what the reply has, and what is refused. The node is a stand-in."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from running_gateway import Running

from cluster.messages import GenerateRequest, Sampling

ROUTES = ("/invoke/stories260K", "/v1/completions")
IDS = [100, 101]
"""Ids of the stand-in's tokens."""


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


def post(gateway: Running, route: str, **fields: Any) -> httpx.Response:
    model = {} if route.startswith("/invoke") else {"model": "stories260K"}
    return gateway.client().post(route, json={"prompt": "Once", "max_tokens": 2, **model, **fields})


def asked(gateway: Running) -> GenerateRequest:
    return gateway.nodes[0].received[-1]


@pytest.mark.parametrize("route", ROUTES)
def test_fields_reach_the_node(gateway: Running, route: str) -> None:
    fields = {
        "allowed_token_ids": [7, 9, 7],
        "cache_salt": "one user",
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    assert post(gateway, route, **fields).status_code == 200
    sent = asked(gateway).sampling
    assert (sent.allowed_token_ids, sent.cache_salt) == ([7, 9], "one user")
    assert (sent.skip_special_tokens, sent.spaces_between_special_tokens) == (False, False)


NEUTRAL: dict[str, Any] = {
    "logits_processors": None, "mm_processor_kwargs": None, "kv_transfer_params": None, "allowed_token_ids": None,
    "cache_salt": None, "request_id": None, "add_special_tokens": True, "spaces_between_special_tokens": True,
    "return_token_ids": False,
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_what_asks_for_nothing_changes_nothing(gateway: Running, route: str) -> None:
    plain = post(gateway, route).json()
    reply = post(gateway, route, **NEUTRAL)
    assert reply.status_code == 200, reply.text
    assert asked(gateway).sampling == Sampling(seed=asked(gateway).sampling.seed)
    assert asked(gateway).token_ids == gateway.nodes[0].received[-2].token_ids
    assert reply.json().keys() == plain.keys()


@pytest.mark.parametrize("route", ROUTES)
def test_eight_stop_strings_and_any_temperature(gateway: Running, route: str) -> None:
    """Agents send eight stop strings; vLLM has no maximum of the temperature."""
    stops = [f"stop {number}" for number in range(16)]
    assert post(gateway, route, stop=stops, temperature=5.5).status_code == 200
    assert (asked(gateway).stop, asked(gateway).sampling.temperature) == (stops, 5.5)
    for fields in ({"stop": [*stops, "one more"]}, {"temperature": 1e7}, {"temperature": -1}):
        assert post(gateway, route, **fields).status_code in (400, 422)


@pytest.mark.parametrize("route", ROUTES)
def test_special_tokens_around_the_prompt(gateway: Running, route: str) -> None:
    sent: dict[bool | None, list[int]] = {}
    for special in (True, False, None):
        assert post(gateway, route, add_special_tokens=special).status_code == 200
        sent[special] = asked(gateway).token_ids
    assert sent[None] == sent[True] == [1, *sent[False]]
    assert post(gateway, route, prompt=[5, 6], add_special_tokens=True).status_code == 200
    assert asked(gateway).token_ids == [5, 6]
    assert post(gateway, route, prompt="", add_special_tokens=False).status_code == 200
    assert asked(gateway).token_ids == [1]


@pytest.mark.parametrize("route", ROUTES)
def test_the_body_may_state_the_request_id(gateway: Running, route: str) -> None:
    assert post(gateway, route, request_id="mine.1").headers["x-request-id"] == "mine.1"
    failed = post(gateway, route, request_id="mine.2", max_tokens=100_000)
    assert failed.json()["error"]["request_id"] == failed.headers["x-request-id"] == "mine.2"
    reply = gateway.client(**{"x-request-id": "header"}).post(
        route, json={"prompt": "x", "model": "stories260K", "request_id": "body"}
        if route.startswith("/v1") else {"prompt": "x", "request_id": "body"},
    )  # fmt: skip
    assert reply.headers["x-request-id"] == "header"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"allowed_token_ids": []}, "allowed_token_ids", ">= 1"),
    ({"allowed_token_ids": [512]}, "allowed_token_ids", "vocabulary ends at 511"),
    ({"allowed_token_ids": list(range(4097))}, "allowed_token_ids", "4096"),
    (
        {"allowed_token_ids": [3], "response_format": {"type": "json_object"}},
        "allowed_token_ids",
        "can't be combined with response_format",
    ),
    ({"cache_salt": ""}, "cache_salt", ">= 1"),
    ({"request_id": "with a space"}, "request_id", "matching regex"),
    ({"logits_processors": ["a.B"]}, "logits_processors", "allowed_token_ids or structured_outputs"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "text alone"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "a node computes"),
    ({"return_token_ids": 1}, "return_token_ids", "bool"),
]


@pytest.mark.parametrize("route", ROUTES)
def test_refusals_name_the_field(gateway: Running, route: str) -> None:
    for fields, param, says in WRONG:
        reply = post(gateway, route, **fields)
        assert reply.status_code == (422 if route.startswith("/invoke") else 400), (fields, reply.text)
        error = reply.json()["error"]
        assert (error["param"], says in error["message"]) == (param, True), (fields, error)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_token_ids_of_completions(gateway: Running) -> None:
    for echo in (False, True):
        reply = post(gateway, "/v1/completions", return_token_ids=True, n=2, prompt=[5, 6], echo=echo)
        for choice in reply.json()["choices"]:
            assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], IDS)
        stream = post(
            gateway, "/v1/completions", return_token_ids=True, n=2, prompt=[5, 6], echo=echo, stream=True, logprobs=1
        )
        by_choice: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        for chunk in events(stream):
            for choice in chunk["choices"]:
                by_choice[choice["index"]].append(choice)
        for choices in by_choice.values():
            assert [choice.get("prompt_token_ids") for choice in choices] == [[5, 6], *[None] * (len(choices) - 1)]
            assert [token for choice in choices for token in choice.get("token_ids", [])] == IDS


def test_token_ids_of_native_calls(gateway: Running) -> None:
    output = post(gateway, "/invoke/stories260K", return_token_ids=True, prompt=[5, 6]).json()["output"]
    assert (output["prompt_token_ids"], output["token_ids"]) == ([5, 6], IDS)
    first, *others = events(post(gateway, "/invoke/stories260K", return_token_ids=True, prompt=[5, 6], stream=True))
    assert (first["prompt_token_ids"], first["token_id"], first["text"]) == ([5, 6], None, "")
    assert [each["token_id"] for each in others if "token_id" in each] == IDS


CHATTING = "{% for message in messages %}{{ message.content }}{% endfor %}{% if tools %}{% endif %}"


def test_token_ids_and_special_tokens_of_chats(gateway: Running, pirate: dict[str, Any]) -> None:
    form = pirate | {"policy": ("policy", json.dumps({"defaults": {"chat_template": CHATTING}}))}
    gateway.client().post("/deploy/pirate", files=form).raise_for_status()
    body = {"model": "pirate", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 2}
    client = gateway.client()
    answer = client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    prompt = asked(gateway).token_ids
    assert (reply["prompt_token_ids"], reply["choices"][0]["token_ids"]) == (prompt, IDS)
    assert client.post("/v1/chat/completions", json={**body, "add_special_tokens": True}).status_code == 200
    assert asked(gateway).token_ids == [1, *prompt]
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    for more in ({}, {"tools": tools}):
        chunks = events(
            client.post("/v1/chat/completions", json={**body, **more, "return_token_ids": True, "stream": True})
        )
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * (len(chunks) - 1)]
        assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == IDS
    plain = client.post("/v1/chat/completions", json=body).json()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
