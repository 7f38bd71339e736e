"""A function's own chat template: as transformers applies it, refused where it can't be, and no harm to others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running_gateway import Running, until, upload
from transformers import AutoTokenizer

from adapters.functions import MAX_TEMPLATE
from gateway.calls import chat_templates, setbacks

OWN = (
    "{{ bos_token }}{% for m in messages %}\n"
    "<{{ m['role'] }}>{{ m['content'] | trim }}{% if m.content == 'stop' %}{% break %}{% endif %}\n"
    "{% endfor %}{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with the user') }}{% endif %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": " Once upon "}, {"role": "assistant", "content": "a time"}]
ENDLESS = (
    "{% if messages[-1].content != 'Hello' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}ok"
)
LARGE = "{% if messages[-1].content != 'Hello' %}{{ 'x' * (10 ** 9) }}{% endif %}ok"
DOUBLING = (
    "{% set ns = namespace(x='xx') %}{% if messages[-1].content != 'Hello' %}"
    "{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}ok"
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host gives a process of low priority next to nothing."""
    monkeypatch.setattr(chat_templates, "ANSWER_SECONDS", 200.0)
    monkeypatch.setattr(chat_templates, "CHECK_SECONDS", 200.0)
    monkeypatch.setattr(chat_templates, "RENDER_SECONDS", 0.4)


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture
def client(gateway: Running, pirate: dict) -> httpx.Client:
    """Over a base that has no template of its own."""
    client = gateway.client()
    client.timeout = 200.0
    assert client.post("/deploy/f", files=pirate).status_code == 201
    return client


TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "Finds an order",
            "parameters": {"$schema": "x", "type": "object", "properties": {"id": {"type": "integer"}}},
        },
    },
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Where is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "find_order", "arguments": '{"id": 4, "x": "é"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sent"},
]


def set_template(client: httpx.Client, template: Any, name: str = "f") -> httpx.Response:
    return client.patch(f"/functions/{name}", json={"defaults": {"chat_template": template}})


def expected(running: Running, messages: list[dict[str, str]], *, answer: bool = True) -> list[int]:
    reference = AutoTokenizer.from_pretrained(running.config.model_dir)
    found: list[int] = reference.apply_chat_template(
        messages, chat_template=OWN, add_generation_prompt=answer, return_dict=False
    )
    return found


def test_calls_have_the_tokens_of_transformers(gateway: Running, client: httpx.Client) -> None:
    body = {"model": "f", "messages": MESSAGES, "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=body).status_code == 400, "neither base nor function has one"
    assert set_template(client, OWN).json()["policy"] == {"defaults": {"chat_template": OWN}}
    (node,) = gateway.nodes
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.keys["acme"], max_retries=0) as official:
        official.chat.completions.create(model="f", messages=MESSAGES, max_tokens=1)  # type: ignore[call-overload]
        assert node.received[-1].token_ids == expected(gateway, MESSAGES)
        with official.chat.completions.create(  # type: ignore[call-overload]
            model="f:latest", messages=[{"role": "user", "content": "stop"}, *MESSAGES], stream=True, max_tokens=1
        ) as stream:
            assert list(stream)
    assert node.received[-1].token_ids == expected(gateway, [{"role": "user", "content": "stop"}, *MESSAGES])
    assert client.post("/invoke/f", json={"messages": MESSAGES, "max_tokens": 1}).status_code == 200
    assert node.received[-1].token_ids == expected(gateway, MESSAGES)
    for answer in (True, False):
        asked = {"model": "f", "messages": MESSAGES, "add_generation_prompt": answer}
        assert client.post("/tokenize", json=asked).json()["tokens"] == expected(gateway, MESSAGES, answer=answer)
    long = [{"role": "user", "content": "Once upon a time " * 20}]
    assert client.post("/tokenize", json={"model": "f", "messages": long}).json()["tokens"] == expected(gateway, long)
    assert client.post("/invoke/stories260K", json={"messages": MESSAGES}).status_code == 422, "the base has none still"
    assert client.post("/invoke/f", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert client.patch("/functions/f", json={"defaults": None}).json()["policy"] == {}
    assert client.post("/invoke/f", json={"messages": MESSAGES}).status_code == 422


@pytest.mark.parametrize("content", ["a time", "a time ", "  a \n", "", "continued <user>"])
def test_a_continued_message_has_the_tokens_of_transformers(
    gateway: Running, client: httpx.Client, content: str
) -> None:
    """The template trims contents."""
    assert set_template(client, OWN).status_code == 200
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    body = {"model": "f", "messages": messages, "max_tokens": 1, "continue_final_message": True}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    reference = AutoTokenizer.from_pretrained(gateway.config.model_dir)
    assert gateway.nodes[0].received[-1].token_ids == reference.apply_chat_template(
        messages, chat_template=OWN, continue_final_message=True, return_dict=False
    )


def test_a_deploy_brings_its_template(gateway: Running, client: httpx.Client, pirate: dict) -> None:
    policy = {"policy": (None, '{"defaults": {"chat_template": "{% for %}"}}')}
    refused = client.post("/deploy/g", files={**pirate, **policy})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "policy.defaults.chat_template")
    assert client.post("/deploy/g?dry_run=true", files={**pirate, **policy}).status_code == 422
    assert client.get("/functions/g").status_code == 404
    policy = {"policy": (None, '{"defaults": {"chat_template": "{{ messages[0].content }}"}}')}
    assert client.post("/deploy/g", files={**pirate, **policy}).status_code == 201
    assert client.post("/invoke/g", json={"messages": MESSAGES, "max_tokens": 1}).status_code == 200


def test_templates_that_can_not_serve_are_refused(client: httpx.Client) -> None:
    for template, told in [
        ("{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
        ("line\n{{ m | nothing }}", "line 2: No filter named 'nothing'"),
        ("{{ messages[0].text.strip() }}", "has no attribute 'text'"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ ().__class__.__mro__ }}{{ ''.format.__globals__ }}", "unsafe"),
        ('{{ "\\ud800" }}', "surrogates"),
        ('{{ raise_exception("\\ud800") }}', ""),
        ("{{ 'x' * (10 ** 11) }}", "MiB of memory"),
        ("{{ messages[0].content * 1000000 }}", "characters"),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", ""),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "of processor time"),
    ]:
        reply = set_template(client, template)
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, "defaults.chat_template"), template
        assert told in reply.json()["error"]["message"], (template, reply.json())
    for template in ("", "x" * (MAX_TEMPLATE + 1), 1):
        reply = set_template(client, template)
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, "defaults.chat_template")
    assert client.get("/functions/f").json()["policy"] == {}
    unserved = client.patch("/functions/f", json={"defaults": {"reasoning_parser": "qwen3"}})
    assert (unserved.status_code, unserved.json()["error"]["param"]) == (422, "defaults.reasoning_parser")


@pytest.mark.parametrize("template", [ENDLESS, LARGE, DOUBLING])
def test_a_template_that_takes_too_much_harms_nobody_else(
    gateway: Running, client: httpx.Client, pirate: dict, template: str
) -> None:
    """It does so only with a conversation that nobody could know when it was set. Another tenant's calls go on beside
    it, in another process. The template is not tried again for a while, and its caller learns when."""
    other = gateway.client("other")
    other.timeout = 200.0
    assert other.post("/deploy/good", files=pirate).status_code == 201
    assert set_template(other, OWN, "good").status_code == 200
    assert set_template(client, template).status_code == 200
    body = {"messages": MESSAGES, "max_tokens": 1}
    with ThreadPoolExecutor(6) as pool:
        bad = [pool.submit(client.post, "/invoke/f", json=body) for _ in range(2)]
        good = [other.post("/invoke/good", json=body) for _ in range(3)]
        refused = [each.result() for each in bad]
    assert [reply.status_code for reply in good] == [200] * 3
    killed, paused = sorted(refused, key=lambda reply: reply.status_code)
    assert (killed.status_code, killed.json()["error"]["param"]) == (422, "messages")
    assert (paused.status_code, paused.json()["error"]["type"]) == (429, "overloaded")
    assert "the chat template is not tried for another" in paused.json()["error"]["message"]
    assert 1 <= int(paused.headers["retry-after"]) <= setbacks.FIRST_PAUSE_S

    def works_again() -> bool:
        hello = client.post("/invoke/f", json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
        assert hello.status_code in (200, 429)
        return hello.status_code == 200

    until(works_again)


def test_tools_have_the_tokens_of_transformers(gateway: Running, client: httpx.Client) -> None:
    """The template gets of each tool what the client has stated, in the order in which models see it in training; not
    `strict`, which is none of the model's."""
    assert set_template(client, TOOLS_TEMPLATE).status_code == 200
    (now, find_order), calls = TOOLS, CALLED[1]["tool_calls"]
    sent = [now, {"function": {"strict": False, **find_order["function"]}, "type": "function"}]
    body = {"model": "f", "messages": CALLED, "tools": sent, "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    function = calls[0]["function"]
    parsed = [{**calls[0], "function": {**function, "arguments": json.loads(function["arguments"])}}]
    messages = [CALLED[0], {**CALLED[1], "tool_calls": parsed}, CALLED[2]]
    reference = AutoTokenizer.from_pretrained(gateway.config.model_dir)
    (node,) = gateway.nodes
    assert node.received[-1].token_ids == reference.apply_chat_template(
        messages, tools=TOOLS, chat_template=TOOLS_TEMPLATE, add_generation_prompt=True, return_dict=False
    )


def test_a_call_waits_no_longer_than_it_says(client: httpx.Client) -> None:
    assert set_template(client, ENDLESS).status_code == 200
    begin = time.monotonic()
    late = client.post("/invoke/f", json={"messages": MESSAGES, "timeout": chat_templates.RENDER_SECONDS / 10})
    assert late.status_code == 504
    again = client.post("/invoke/f", json={"messages": MESSAGES})
    assert again.status_code == 429, "the template was killed although nobody waited for it any more"
    assert time.monotonic() - begin < 60


def test_a_base_s_own_template_gives_way(
    start: Callable[..., Running], smollm_dir: Path, smollm_adapters: dict[str, Path]
) -> None:
    """Of SmolLM2, whose tokenizer and template are a really trained chat model's."""
    running = start(model_dir=str(smollm_dir), base_id="SmolLM2")
    client = running.client()
    assert client.post("/deploy/f", files=upload(smollm_adapters["pirate"])).status_code == 201
    reference = AutoTokenizer.from_pretrained(smollm_dir)
    asked = {"model": "f", "messages": MESSAGES}
    base = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert client.post("/tokenize", json=asked).json()["tokens"] == base
    assert set_template(client, OWN).status_code == 200
    assert client.post("/tokenize", json=asked).json()["tokens"] == expected(running, MESSAGES) != base
