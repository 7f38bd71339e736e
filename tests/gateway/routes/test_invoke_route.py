"""Native invocations against a node that echoes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import httpx_sse
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_gateway import Running, plain_client
from stub_node import hang_after_first, hang_before_first

from cluster.limits import Call, MemoryLimits
from gateway.api import schema

SETTLE_SECONDS = 0.2


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture
def client(gateway: Running, pirate: dict) -> httpx.Client:
    client = gateway.client()
    assert client.post("/deploy/pirate", files=pirate).status_code == 201
    return client


def test_reply_and_headers(client: httpx.Client, gateway: Running) -> None:
    reply = client.post("/invoke/pirate", json={"prompt": "Once", "max_tokens": 3}, headers={"x-request-id": "mine-1"})
    body = msgspec.json.decode(reply.content, type=schema.InvokeReply)
    assert body.output == schema.Output(text=" t0 t1 t2", finish_reason="length")
    assert (body.function, body.version) == ("pirate", 1)
    assert body.usage.completion_tokens == 3
    assert body.timing.queue_ms == 1.0
    assert body.timing.cold_start == schema.ColdStartTiming(state="host", plan="wait", load_ms=30.0, exposed_ms=10.0)
    assert body.timing.ttft_ms is not None
    assert 0 < body.timing.ttft_ms <= body.timing.total_ms
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.headers["x-garnish-function"] == "pirate"
    assert reply.headers["x-garnish-version"] == "1"
    assert reply.headers["x-garnish-node"] == "node-0"
    assert reply.headers["x-garnish-cold-start"] == "host"
    steps = [part.split(";")[0] for part in reply.headers["server-timing"].split(", ")]
    assert {"auth", "resolve", "schedule", "queue", "fetch", "load", "exposed", "prefill", "decode"} <= set(steps)
    assert 'cold;desc="wait: 0 layers on CPU workers and 0 on the device; 0 replays"' in reply.headers["server-timing"]
    asked = gateway.nodes[0].received[0]
    assert asked.adapter is not None
    assert asked.adapter.digest == body.digest
    assert asked.base == gateway.base.fingerprint


@pytest.mark.parametrize("stream", [False, True])
def test_the_total_ends_before_places_are_given_back(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    settle = MemoryLimits.settle

    async def slow(limits: MemoryLimits, call: Call, unused_tokens: int) -> None:
        await asyncio.sleep(SETTLE_SECONDS)
        await settle(limits, call, unused_tokens)

    monkeypatch.setattr(MemoryLimits, "settle", slow)
    assert client.patch("/functions/pirate", json={"max_concurrency": 4}).status_code == 200
    body = {"prompt": "Once", "max_tokens": 3, "n": 2, "stream": stream}
    begin = time.monotonic()
    reply = client.post("/invoke/pirate", json=body).text
    seconds = time.monotonic() - begin
    answer = msgspec.json.decode(reply.rpartition("data: ")[2])
    assert 0 < answer["timing"]["ttft_ms"] <= answer["timing"]["total_ms"] <= 1e3 * (seconds - SETTLE_SECONDS)


def test_stream(client: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 3, "stream": True, "logprobs": 1}
    with httpx_sse.connect_sse(client, "POST", "/invoke/pirate", json=body) as source:
        assert source.response.headers["content-type"].startswith("text/event-stream")
        assert source.response.headers["x-accel-buffering"] == "no"
        assert source.response.headers["x-garnish-version"] == "1"
        events = list(source.iter_sse())
    assert [event.event for event in events] == ["token"] * 3 + ["done"]
    tokens = [msgspec.json.decode(event.data, type=schema.TokenEvent) for event in events[:-1]]
    assert [(token.text, token.index, token.token_id) for token in tokens] == [
        (" t0", 0, 100),
        (" t1", 1, 101),
        (" t2", 2, 102),
    ]
    assert tokens[0].logprob is not None
    done = msgspec.json.decode(events[-1].data, type=schema.DoneEvent)
    assert (done.output.finish_reason, done.node, done.cold_start) == ("length", "node-0", "host")
    assert "decode;dur=" in done.server_timing


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("text/event-stream", "text/event-stream"),
        ("application/json;q=0.5, Text/Event-Stream; q=0.9", "text/event-stream"),
        ("text/event-stream;q=0", "application/json"),
        ("text/event-stream ; Q=0.000, */*", "application/json"),
        ("text/event-streams, x/text/event-stream", "application/json"),
        ("*/*", "application/json"),
    ],
)
def test_accept_header_asks_for_a_stream(client: httpx.Client, accept: str, kind: str) -> None:
    reply = client.post("/invoke/pirate", json={"prompt": "x"}, headers={"accept": accept})
    assert reply.headers["content-type"].partition(";")[0] == kind


def test_first_token_is_sent_before_the_second_exists(start: Callable[..., Running]) -> None:
    running = start()
    node = running.node(hang_after_first)
    body = {"prompt": "x", "stream": True}
    with httpx_sse.connect_sse(running.client(), "POST", "/invoke/stories260K", json=body) as source:
        events = source.iter_sse()
        assert next(events).json()["text"] == "first"
        node.go_on.set()
        assert [event.event for event in events] == ["token", "done"]


def test_headers_and_comments_come_while_nothing_else_does(start: Callable[..., Running]) -> None:
    running = start(header_seconds=0.05, keepalive_seconds=0.05)
    node = running.node(hang_before_first)
    body = {"prompt": "x", "stream": True}
    with running.client().stream("POST", "/invoke/stories260K", json=body) as reply:
        assert reply.status_code == 200
        assert "x-garnish-cold-start" in reply.headers or "x-garnish-function" in reply.headers
        lines = reply.iter_lines()
        assert next(lines) == ": keep-alive"
        node.go_on.set()
        assert any(line.startswith("event: done") for line in lines)


def test_defaults(client: httpx.Client, gateway: Running) -> None:
    client.post("/invoke/pirate", json={"prompt": "x"})
    client.post("/invoke/pirate", json={"prompt": "x"})
    first, second = gateway.nodes[0].received
    assert (first.max_tokens, first.sampling.temperature, first.sampling.top_p) == (256, 1.0, 1.0)
    assert first.sampling.seed != second.sampling.seed
    assert 0 < first.timeout <= gateway.config.request_timeout


def test_default_max_tokens_is_what_the_context_leaves(client: httpx.Client, gateway: Running) -> None:
    ids = gateway.base.max_context - 10
    prompt = "a" * (ids - 2)
    assert client.post("/invoke/pirate", json={"prompt": prompt}).status_code == 200
    asked = gateway.nodes[0].received[0]
    assert asked.max_tokens == gateway.base.max_context - len(asked.token_ids) < 256


def test_empty_prompt_is_bos_alone(client: httpx.Client, gateway: Running) -> None:
    assert client.post("/invoke/pirate", json={"prompt": ""}).status_code == 200
    assert gateway.nodes[0].received[0].token_ids == [1]


def test_qualifiers(client: httpx.Client, pirate: dict) -> None:
    for path in ("pirate:latest", "pirate:1", "pirate?qualifier=latest", "pirate:1?qualifier=1"):
        assert client.post(f"/invoke/{path}", json={"prompt": "x"}).status_code == 200, path
    for path in ("pirate:2", "pirate:", "pirate:no", "pirate?qualifier=nope", "stories260K:1"):
        reply = client.post(f"/invoke/{path}", json={"prompt": "x"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found"), path
    assert client.post("/invoke/pirate:1?qualifier=2", json={"prompt": "x"}).status_code == 422
    assert client.post("/invoke/pirate?other=2", json={"prompt": "x"}).status_code == 422


def test_function_defaults_apply_under_the_callers_values(gateway: Running, pirate: dict) -> None:
    client = gateway.client()
    policy = '{"defaults": {"temperature": 0.5, "top_k": 7, "stop": ["END"], "max_tokens": 5}, "timeout": 30}'
    assert client.post("/deploy/tuned", files=pirate, data={"policy": policy}).status_code == 201
    client.post("/invoke/tuned", json={"prompt": "x", "top_k": 3})
    asked = gateway.nodes[0].received[0]
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.stop) == (0.5, 3, ["END"])
    assert asked.max_tokens == 5
    assert asked.timeout <= 30


NUMBERS = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), st.lists(st.text(max_size=3), max_size=3))
FIELDS = [field for field in schema.InvokeRequest.__struct_fields__ if field not in ("stream", "timeout")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(st.sampled_from([*FIELDS, "bogus"]), VALUES, max_size=4), prompt=st.text(max_size=8))
def test_any_body_is_served_or_refused_by_name(gateway: Running, body: dict, prompt: str) -> None:
    """What is served reaches the node in bounds; what is not names a field."""
    with plain_client(gateway.url, {"x-api-key": gateway.keys["acme"]}) as client:
        reply = client.post("/invoke/stories260K", content=msgspec.json.encode({"prompt": prompt, **body}))
    assert reply.status_code in (200, 400, 422)
    if reply.status_code == 422:
        assert reply.json()["error"]["param"] is not None
        return
    if reply.status_code == 200:
        asked = gateway.nodes[0].received[-1]
        assert 1 <= asked.max_tokens <= gateway.base.max_context - len(asked.token_ids)
        assert 0 <= asked.sampling.temperature <= 2
        assert 0 < asked.sampling.top_p <= 1
        assert 0 <= asked.sampling.seed < 1 << 63


def test_many_at_once(client: httpx.Client) -> None:
    with ThreadPoolExecutor(16) as pool:
        codes = pool.map(lambda _: client.post("/invoke/pirate", json={"prompt": "x"}).status_code, range(32))
    assert list(codes) == [200] * 32
