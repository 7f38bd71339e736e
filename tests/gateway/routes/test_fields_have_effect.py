"""Each field of a call changes what is computed or answered, or is refused: none is accepted and ignored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running_gateway import Running, start_gateway

from cluster.messages import GenerateRequest
from gateway.api import openai_schema as openai
from gateway.api import schema
from gateway.routes.tokens import DetokenizeRequest, TokenizeRequest

DATA = Path(__file__).parents[1] / "data"
BASE = "stories260K"
MESSAGES = [{"role": "user", "content": "Once upon"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{{ tools }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.name }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)
VOLATILE = {"id", "created", "timing", "timeout", "place", "queued", "request_id", "server_timing"}

GENERATION: dict[str, Any] = {
    "max_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
    "frequency_penalty": 1, "repetition_penalty": 2, "seed": 2, "stop": "x", "stop_token_ids": [7], "ignore_eos": True,
    "min_tokens": 1, "logit_bias": {"5": 1}, "bad_words": ["Once"], "skip_special_tokens": False,
    "include_stop_str_in_output": True, "truncate_prompt_tokens": 1, "timeout": 5, "n": 2, "prompt_logprobs": 1,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "allowed_token_ids": [5, 7],
    "spaces_between_special_tokens": False, "return_token_ids": True, "cache_salt": "s", "request_id": "call-7",
}  # fmt: skip
SHARED = {**GENERATION, "model": "nobody", "stream": True, "stream_options": {"include_usage": True}}
VALUES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "/invoke/stories260K": (
        schema.InvokeRequest,
        {"prompt": "Once upon", "max_tokens": 3, "seed": 1},
        {
            **GENERATION, "add_special_tokens": False, "prompt": "Twice", "messages": MESSAGES, "logprobs": 1,
            "echo": True, "stream": True,
            "background": True, "on_success": {"webhook": "https://example.com"},
            "on_failure": {"webhook": "https://example.com"},
        },
    ),
    "/v1/completions": (
        openai.CompletionRequest,
        {"model": BASE, "prompt": "Once upon", "max_tokens": 3, "seed": 1},
        {**SHARED, "add_special_tokens": False, "prompt": "Twice", "logprobs": 1, "echo": True},
    ),
    "/v1/chat/completions": (
        openai.ChatRequest,
        {"model": BASE, "messages": MESSAGES, "max_tokens": 3, "seed": 1},
        {
            **SHARED, "messages": [{"role": "user", "content": "Twice", "name": "Ann"}], "max_completion_tokens": 2,
            "logprobs": True, "top_logprobs": 1, "tools": TOOLS, "tool_choice": "required",
            "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "include_reasoning": False,
            "add_special_tokens": True, "add_generation_prompt": False, "continue_final_message": True,
        },
    ),
    "/tokenize": (
        TokenizeRequest,
        {"prompt": "Once upon"},
        {
            "model": "nobody", "prompt": "Twice", "messages": MESSAGES, "add_special_tokens": False,
            "add_generation_prompt": False, "continue_final_message": True, "return_token_strs": True,
        },
    ),
    "/detokenize": (DetokenizeRequest, {"tokens": [403, 407]}, {"model": "nobody", "tokens": [403]}),
}  # fmt: skip
"""Of each route: its body's type, a body, and a value for each field that must make another outcome."""
CONTEXT: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "include_reasoning": {"model": "thinker"},
    "messages": {"prompt": None},
    "add_generation_prompt": {"prompt": None, "messages": MESSAGES},
    "continue_final_message": {"prompt": None, "messages": MESSAGES},
    "include_stop_str_in_output": {"stop": "x"},
}
"""Fields of which a field depends."""
NOTES = {"metadata", "stream_options"}
"""Fields of /invoke that are documented as being for the caller alone."""


@pytest.fixture(scope="module")
def shared_gateway(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("chatty")
    shutil.copytree(stories_dir, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        running = start_gateway(stack, folder / "model", folder)
        running.node()
        yield running


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


def outcome(gateway: Running, path: str, body: dict[str, Any]) -> Any:
    """Status, answer, and what the node was asked, without what differs between equal calls."""
    node = gateway.nodes[0]
    node.received.clear()
    stated = {name: value for name, value in body.items() if value is not None}
    reply = gateway.client().post(path, json=stated)
    timeouts = [round(each.timeout) for each in node.received]
    answer = reply.text if "stream" in stated else _steady(reply.json())
    shown = _lines(answer) if isinstance(answer, str) else answer
    if "request_id" in stated:
        shown = [reply.headers["x-request-id"], shown]
    return reply.status_code, shown, [_asked(each) for each in node.received], timeouts


def _asked(request: GenerateRequest) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(request).items() if name not in VOLATILE}


def _lines(text: str) -> list[Any]:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [_steady(json.loads(event)) for event in events] or [_steady(json.loads(text))] if text else []


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _steady(each) for name, each in value.items() if name not in VOLATILE}
    return [_steady(each) for each in value] if isinstance(value, list) else value


def test_the_table_has_each_field_of_each_call() -> None:
    for path, (kind, _, values) in VALUES.items():
        notes = NOTES if path.startswith("/invoke") else set()
        assert values.keys() | notes == set(kind.__struct_fields__), path


@pytest.mark.parametrize("path", VALUES)
def test_each_field_has_an_effect_or_is_refused(gateway: Running, path: str, pirate: dict[str, Any]) -> None:
    client = gateway.client()
    assert client.post("/deploy/thinker", files=pirate).status_code == 201
    policy = {"defaults": {"reasoning_parser": "think"}}
    assert client.patch("/functions/thinker", json=policy).status_code == 200
    _, body, values = VALUES[path]
    without: dict[str, Any] = {}
    for field, value in values.items():
        context = body | CONTEXT.get(field, {})
        key = json.dumps(context)
        if key not in without:
            without[key] = outcome(gateway, path, context)
            assert outcome(gateway, path, context) == without[key], "equal calls have equal outcomes"
        assert outcome(gateway, path, context | {field: value}) != without[key], field


def test_a_template_in_a_call_is_refused_by_name(gateway: Running) -> None:
    for path, (_, body, _) in list(VALUES.items())[:3]:
        for template in ("{{ messages[0].content }}", "{{ nonsense("):
            reply = gateway.client().post(path, json={**body, "chat_template": template})
            assert (reply.status_code, reply.json()["error"]["param"]) == (
                400 if path.startswith("/v1") else 422,
                "chat_template",
            )
        for field in ("tool_parser", "reasoning_parser"):
            assert gateway.client().post(path, json={**body, field: "hermes"}).status_code in (400, 422)
        reply = gateway.client().post(path, json={**body, "chat_templat": "x"})
        assert "chat_template'" not in reply.json()["error"]["message"], "it is no advice"


@pytest.mark.parametrize("name", ["history_neutral_fields", "call_neutral_fields"])
def test_what_asks_for_nothing_is_accepted(gateway: Running, name: str) -> None:
    for line in (DATA / f"{name}.jsonl").read_text().splitlines():
        body = json.loads(line) | {"model": BASE, "seed": 1}
        reply = gateway.client().post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, (line, reply.text)


NULLS = (
    *("best_of", "suffix", "echo", "documents", "chat_template", "mm_processor_kwargs", "media_io_kwargs"),
    *("vllm_xargs", "kv_transfer_params", "logits_processors", "thinking_token_budget", "repetition_detection"),
    *("prompt_embeds", "guided_json", "guided_decoding_backend", "response_format", "stop", "tools", "tool_choice"),
    *("functions", "function_call", "audio", "modalities", "prediction", "store", "metadata", "verbosity", "user"),
    *("web_search_options", "service_tier", "parallel_tool_calls", "stream", "stream_options", "n", "logit_bias"),
    *("top_logprobs", "logprobs", "max_tokens", "max_completion_tokens", "extra_body", "thinking", "cache_control"),
)
"""Fields that OpenAI's, vLLM's and LiteLLM's clients send as null."""
DEFAULTS = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "logprobs": False, "top_logprobs": 0, "n": 1, "stop": [],
    "stream": False, "tool_choice": "none", "include_reasoning": True, "use_beam_search": False, "top_p": 1.0,
    "temperature": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "bad_words": [],
    "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "echo": False,
    "skip_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False, "priority": 0,
    "chat_template_kwargs": {}, "return_tokens_as_token_ids": False, "logit_bias": {}, "tools": [], "detokenize": True,
    "response_format": {"type": "text", "json_schema": None}, "parallel_tool_calls": True, "store": False,
    "modalities": ["text"], "verbosity": "medium", "service_tier": "auto", "stream_options": None, "documents": [],
}  # fmt: skip
"""Defaults of vLLM's and OpenAI's fields, as clients send them that dump all fields."""


@pytest.mark.parametrize("fields", [dict.fromkeys(NULLS), DEFAULTS], ids=["nulls", "defaults"])
def test_fields_that_clients_send_at_their_defaults_change_nothing(gateway: Running, fields: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    body = {"model": BASE, "messages": MESSAGES, "seed": 1, "max_completion_tokens": 3}
    plain = outcome(gateway, path, body)
    reply = gateway.client().post(path, json=fields | body)
    assert (reply.status_code, _steady(reply.json())) == plain[:2], reply.text
    assert [_asked(gateway.nodes[0].received[-1])] == plain[2]


def test_histories_of_other_services_are_read(gateway: Running) -> None:
    """Messages as LiteLLM and vLLM write them are those of the plain conversation."""
    path, call = (
        "/v1/chat/completions",
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    )
    nothing: dict[str, Any] = {
        "refusal": None, "annotations": [], "audio": None, "function_call": None, "reasoning_content": None,
        "reasoning": None, "images": [], "thinking_blocks": None, "provider_specific_fields": {"refusal": None},
        "tool_calls": [], "name": None, "tool_call_id": None,
    }  # fmt: skip
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, **nothing},
        {"role": "user", "content": "b", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", **nothing, "content": None, "tool_calls": [{**call, "index": 0, "extra": None}]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": None},
    ]
    plain = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    asked = []
    for messages in (history, plain):
        reply = gateway.client().post(path, json={"model": BASE, "messages": messages, "max_tokens": 1})
        assert reply.status_code == 200, reply.text
        asked.append(gateway.nodes[0].received[-1].token_ids)
    assert asked[0] == asked[1]
    native = [{"role": "assistant", "content": None, **nothing}, {"role": "user", "content": "b", **nothing}]
    reply = gateway.client().post(f"/invoke/{BASE}", json={"messages": native, "max_tokens": 1, "anything": None})
    assert reply.status_code == 200, reply.text
