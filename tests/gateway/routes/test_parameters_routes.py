"""What the three routes accept, refuse and hand to nodes of vLLM's parameters. The node is a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_gateway import Running
from stub_node import StubNode, done, echo, refuse, token
from tokenizers import Tokenizer

from cluster.messages import (
    PROTOCOL_VERSION,
    Event,
    Failed,
    GenerateRequest,
    PromptLogprobs,
    Sampling,
    Started,
    TokenLogprob,
    TopLogprob,
)

ROUTES = ("/invoke/stories260K", "/v1/completions")


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


def post(gateway: Running, route: str, **fields: Any) -> httpx.Response:
    model = {} if route.startswith("/invoke") else {"model": "stories260K"}
    return gateway.client().post(route, json={"prompt": "Once", **model, **fields})


def asked(gateway: Running) -> GenerateRequest:
    return gateway.nodes[0].received[-1]


PARAMETERS: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "logit_bias": {"5": -100, "511": 1.5, "7": 0},
    "min_tokens": 3,
    "stop_token_ids": [4, 4, 9],
    "bad_words": ["upon"],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 1,
}


@pytest.mark.parametrize("route", ROUTES)
def test_parameters_reach_the_node(gateway: Running, route: str) -> None:
    assert post(gateway, route, **PARAMETERS, top_k=-1).status_code == 200
    sent = asked(gateway).sampling
    assert (sent.repetition_penalty, sent.logit_bias, sent.min_tokens) == (1.2, {5: -100.0, 511: 1.5}, 3)
    assert (sent.stop_token_ids, sent.skip_special_tokens, sent.include_stop) == ([4, 9], False, True)
    assert (sent.prompt_logprobs, sent.top_k) == (1, 0)
    tokenizer = gateway_tokenizer(gateway)
    assert sent.bad_words[0] == tokenizer.encode("upon", add_special_tokens=False).ids
    assert asked(gateway).v == PROTOCOL_VERSION


def gateway_tokenizer(gateway: Running) -> Any:
    return Tokenizer.from_file(f"{gateway.config.model_dir}/tokenizer.json")


NEUTRAL: dict[str, Any] = {
    "n": 1, "best_of": 1, "use_beam_search": False, "logit_bias": {}, "repetition_penalty": 1.0, "top_k": -1,
    "min_p": 0,
    "seed": None, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "stop_token_ids": [],
    "bad_words": None, "min_tokens": 0, "length_penalty": 1.0, "early_stopping": False, "priority": 0,
    "guided_json": None, "structured_outputs": None, "echo": False, "prompt_logprobs": None,
    "skip_special_tokens": True, "include_stop_str_in_output": False, "truncate_prompt_tokens": None,
    "stream_options": {"include_usage": True}, "logprobs": None, "suffix": None,
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_what_asks_for_nothing_changes_nothing(gateway: Running, route: str) -> None:
    reply = post(gateway, route, **NEUTRAL)
    assert reply.status_code == 200, reply.text
    sent = asked(gateway)
    assert sent.sampling == Sampling(seed=sent.sampling.seed)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ({"repetition_penalty": "1"}, "repetition_penalty", "float"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "token id 512; the base model's vocabulary ends at 511"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "keys are token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "keys are token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"min_tokens": -1}, "min_tokens", ">= 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9, but the output may have 8 tokens"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "vocabulary ends at 511"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ">= 0"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "128"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "int"),
    ({"bad_words": [""]}, "bad_words", ">= 1"),
    ({"bad_words": [" "]}, "bad_words", "logit_bias"),
    ({"bad_words": ["x"] * 129}, "bad_words", "128"),
    ({"bad_words": ["x" * 200] * 100}, "bad_words", "together they may have 4096"),
    ({"bad_words": "x"}, "bad_words", "array"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 17}, "n", "<= 16"),
    ({"n": 2.5}, "n", "int"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "bool"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output", "bool"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "it may be -1 or 1 to 512"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "512"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
    ({"prompt": []}, "prompt", "length >= 1"),
    ({"prompt": [1, 512]}, "prompt", "vocabulary ends at 511"),
    ({"prompt": [1, -1]}, "prompt", ">= 0"),
    ({"prompt": [1.5]}, "prompt", "float"),
    ({"prompt": [1] * 600}, "prompt", "(600 in the prompt, 1 in the completion)"),
    ({"best_of": 2}, "best_of", "best_of is not served; use n, which returns all choices"),
    ({"use_beam_search": True}, "use_beam_search", "docs/guide/invoke.md"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"guided_json": {}}, "guided_json", "use structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs", "state one of json, regex, choice, grammar"),
    ({"tools": [{"type": "function"}]}, "tools", "on /v1/chat/completions"),
    ({"priority": 3}, "priority", "slo_class"),
    ({"max_tokens": False}, "max_tokens", "int"),
    ({"max_tokens": 0}, "max_tokens", "to score a prompt use 1, with prompt_logprobs"),
]


@pytest.mark.parametrize("route", ROUTES)
def test_refusals_name_the_field_and_say_what_works(gateway: Running, route: str) -> None:
    for fields, param, says in WRONG:
        reply = post(gateway, route, **fields)
        assert reply.status_code == (422 if route.startswith("/invoke") else 400), (fields, reply.text)
        error = reply.json()["error"]
        assert error["param"].partition("[")[0] == param, (fields, error)
        assert says in error["message"], (fields, error)
    assert gateway.nodes[0].received == []


def test_refusals_of_one_route(gateway: Running) -> None:
    for fields, param, says in [
        ({"prompt": ["a", [1]]}, "prompt", "send texts, token ids, or lists of token ids"),
        ({"prompt": ["a", 1]}, "prompt", "send texts, token ids, or lists of token ids"),
        ({"prompt": [[1], []]}, "prompt", "length >= 1"),
        ({"prompt": [[1], [512]]}, "prompt", "vocabulary ends at 511"),
        ({"prompt": ["a"] * 5, "n": 16}, "n", "prompts times n may be at most 64"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "use echo with logprobs"),
        ({"prompt": [[1] * 400] * 64, "prompt_logprobs": 20}, "prompt_logprobs", "are more than 65536"),
    ]:
        error = post(gateway, "/v1/completions", **fields).json()["error"]
        assert error["param"].partition("[")[0] == param, (fields, error)
        assert says in error["message"], (fields, error)
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "echo": True}
    assert "prompt_logprobs" in gateway.client().post(ROUTES[0], json=body).json()["error"]["message"]
    chat = gateway.client().post("/v1/chat/completions", json={"model": "stories260K", **body})
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "echo")
    for message, param, says in [
        ({"role": "function", "content": "4", "name": "x"}, "messages[0].role", "role function is not served"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
         "messages[0].content[1].type", "image_url is not served; the base reads text alone"),
        ({"role": "nurse", "content": "a"}, "messages[0].role", "nurse"),
        ({"role": ["tool"], "content": 4}, "messages[0].role", "str"),
    ]:  # fmt: skip
        for route, said in (("/v1/chat/completions", {"model": "stories260K"}), (ROUTES[0], {})):
            reply = gateway.client().post(route, json={**said, "messages": [message]})
            error = reply.json()["error"]
            assert reply.status_code == (400 if said else 422) and error["param"] == param, (message, error)
            assert says in error["message"], (message, error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(sorted(NEUTRAL)), value=JSON, route=st.sampled_from(ROUTES))
def test_drawn_values_are_served_or_refused_by_name(gateway: Running, field: str, value: Any, route: str) -> None:
    reply = post(gateway, route, max_tokens=2, **{field: value})
    if reply.status_code != 200:
        assert reply.status_code == (422 if route.startswith("/invoke") else 400), reply.text
        assert reply.json()["error"]["param"].startswith((field, "min_tokens")), reply.text


async def scores_then_fails(node: StubNode, request: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    yield PromptLogprobs(1, [TokenLogprob("lost", 7, -9.0, rank=9)])
    yield Failed(type="unavailable", message="going", retryable=True)


async def scores(node: StubNode, request: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    yield PromptLogprobs(1, [TokenLogprob("a", 403, -0.5, rank=2)])
    yield PromptLogprobs(2, [TokenLogprob("b", 407, -1.5, [TopLogprob("c", 5, -0.1)], rank=3)])
    yield token(0, " t0", request.sampling.logprobs)
    yield done(request, 1)


def test_scores_of_a_node_that_failed_are_not_told(start: Callable[..., Running]) -> None:
    running = start()
    failing = running.node(scores_then_fails, "a-failing")
    running.node(scores, "b-good", queued=1, running=1)
    asked = {"prompt": [1, 403, 407], "prompt_logprobs": 1, "max_tokens": 1}
    while not failing.received:
        reply = post(running, ROUTES[0], **asked)
        assert [entry and entry["token"] for entry in reply.json()["output"]["prompt_logprobs"]] == [None, "a", "b"]
    found = post(running, ROUTES[1], **asked).json()["choices"][0]["prompt_logprobs"]
    assert found[2] == {
        "407": {"logprob": -1.5, "rank": 3, "decoded_token": "b"},
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": "c"},
    }


def test_one_choice_that_fails_ends_them_all(start: Callable[..., Running]) -> None:
    async def second_refused(node: StubNode, request: GenerateRequest) -> AsyncIterator[Event | bytes]:
        script = refuse if request.sampling.choice == 1 else echo
        async for event in script(node, request):
            yield event

    running = start()
    running.node(second_refused)
    for route in ROUTES:
        reply = post(running, route, n=3, max_tokens=2)
        assert (reply.status_code, reply.json()["error"]["type"]) in ((503, "unavailable"), (503, "server_error"))
