"""What the gateway logs in a run with calls that succeed and that fail: request ids, and nothing that callers sent."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from stub_node import Cut, StubNode, done, stub_node, token
from test_gateway_server import config, node_of, process, wait_for  # noqa: F401  (config is a fixture)

from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from cluster.messages import Event, GenerateRequest, Started
from gateway.calls.trace_log import CALL
from gateway.config import GatewayConfig

MARK = "MARKED-7f3a"


async def by_length(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """Ends well, or breaks off before or after the first token, or sends what is no event."""
    yield Started(node=node.node_id, cold_start="none")
    if asked.max_tokens == 1:
        raise Cut
    yield token(0, f"{MARK}-output")
    if asked.max_tokens == 2:
        raise Cut
    if asked.max_tokens == 3:
        yield b"\0\0\0\4" + MARK.encode()[:4]
    yield done(asked, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_no_prompt_key_or_output_is_logged(config: GatewayConfig, tmp_path: Path, stream: bool) -> None:  # noqa: F811
    tenants = Tenants(LocalStore(Path(config.registry)))
    tenants.put("acme")
    key, log, url = tenants.add_key("acme")[0], tmp_path / "log", f"http://127.0.0.1:{config.port}"
    with (
        process(msgspec.structs.replace(config, auth="keys"), log) as child,
        stub_node(node_of(config, by_length)) as node,
    ):
        wait_for(url, "/healthz", child)
        headers = {"authorization": f"Bearer {key}", "x-request-id": "known-request"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, verify=False) as client:
            path = "/invoke/stories260K"
            for count in (4, 1, 2, 3):  # a node that failed often gets no calls
                assert node.publish(url).status_code == 204
                client.post(path, json={"prompt": MARK, "max_tokens": count, "stream": stream})
            client.post(path, content=json.dumps({"prompt": MARK})[:-1], headers={"content-type": "application/json"})
            client.post(path, json={"prompt": MARK, MARK: 1})
            client.post(path, json={"prompt": MARK * 1000})
            client.post("/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": MARK}]})
            client.post(f"/invoke/{MARK}", json={"prompt": MARK})
            client.get("/functions", headers={"authorization": f"Bearer {key[:-1]}x"})
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
    text = log.read_text()
    assert MARK not in text
    assert key.rpartition("_")[2][:16] not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["process"] for line in lines} == {"gateway"}
    assert [line["message"] for line in lines[:2]] == ["listening", "worker is ready"], "and no server's own lines"
    told = [line for line in lines if line["level"] in ("warning", "error")]
    assert told, "nodes that break off are told"
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert all("request_id" in line or "invocation" in line for line in told if line["logger"] == "gateway")
    calls = [line["call"] for line in lines if line["message"] == CALL]
    assert calls, "calls that ended well are told"
    assert all((call["tenant"], call["digest"], call["output_tokens"]) == ("acme", "", 1) for call in calls)
    assert all(abs(call["at"] - time.time()) < 60 for call in calls)
