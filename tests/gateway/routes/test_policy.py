"""PATCH /functions/{name}: what it takes, what it refuses, and that what it takes is enforced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from running_gateway import Running, until_received
from stub_node import hang_before_first

CALL = {"prompt": "x", "max_tokens": 1}


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture
def client(gateway: Running, pirate: dict) -> httpx.Client:
    client = gateway.client()
    assert client.post("/deploy/f", files=pirate).status_code == 201
    return client


def test_stated_fields_change_and_null_takes_one_back(gateway: Running, client: httpx.Client) -> None:
    first = client.patch("/functions/f", json={"timeout": 5, "defaults": {"max_tokens": 3, "temperature": 0}})
    assert first.status_code == 200
    assert first.json() == client.get("/functions/f").json()
    assert first.json()["policy"] == {"timeout": 5, "defaults": {"max_tokens": 3, "temperature": 0}}
    assert client.post("/invoke/f", json={"prompt": "x"}).json()["usage"]["completion_tokens"] == 3
    (node,) = gateway.nodes
    assert (node.received[-1].sampling.temperature, node.received[-1].timeout <= 5) == (0, True)
    second = client.patch("/functions/f", json={"timeout": None, "defaults": {"max_tokens": 2}})
    assert second.json()["policy"] == {"defaults": {"max_tokens": 2}}
    assert client.post("/invoke/f", json={"prompt": "x"}).json()["usage"]["completion_tokens"] == 2
    assert client.patch("/functions/f", json={"defaults": None}).json()["policy"] == {}
    same = client.patch("/functions/f", json={})
    assert (same.status_code, same.json()["generation"]) == (200, second.json()["generation"] + 1)


def test_what_is_not_enforced_is_refused(client: httpx.Client) -> None:
    for field, value, param in [
        ("slo_class", "gold", "slo_class"),
        ("provisioned", 1, "provisioned"),
        ("provisioned", {"device": 17}, "provisioned.device"),
        ("provisioned", {"disk": 1}, "provisioned"),
        ("idle_ttl", 0, "idle_ttl"),
        ("reserved_concurrency", 0, "reserved_concurrency"),
        ("prefetch", "never", "prefetch"),
        ("prefetch", False, "prefetch"),
        ("odd", 1, "odd"),
        ("timeout", 0, "timeout"),
        ("timeout", "5", "timeout"),
        ("max_concurrency", 0, "max_concurrency"),
        ("max_concurrency", 1.5, "max_concurrency"),
        ("defaults", {"tool_parser": "pythonic"}, "defaults.tool_parser"),
        ("defaults", {"parser": "hermes"}, "defaults"),
        ("defaults", {"temperature": -3}, "defaults.temperature"),
        ("defaults", [], "defaults"),
        ("defaults", {"stop": ""}, "defaults.stop"),
        ("defaults", {"stop": ["end", ""]}, "defaults.stop[1]"),
        ("defaults", {"stop": "x" * 257}, "defaults.stop"),
    ]:
        reply = client.patch("/functions/f", json={field: value, "timeout": 7} | {field: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, param), field
    assert client.get("/functions/f").json()["policy"] == {}
    assert client.patch("/functions/f", json=[]).status_code == 422
    assert client.patch("/functions/f", content=b"{").status_code == 400
    assert client.patch("/functions/g", json={"timeout": 5}).status_code == 404


def test_a_function_runs_no_more_at_once_than_its_policy_says(gateway: Running, client: httpx.Client) -> None:
    assert client.patch("/functions/f", json={"max_concurrency": 2}).status_code == 200
    (node,) = gateway.nodes
    node.script = hang_before_first

    def stream() -> int:
        with client.stream("POST", "/invoke/f", json=CALL | {"stream": True}) as reply:
            return reply.status_code if "event: done" in reply.read().decode() else 0

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(stream) for _ in range(2)]
        until_received(node, 2, running)
        for path, body in [("/invoke/f", CALL), ("/v1/completions", CALL | {"model": "f"})]:
            refused = client.post(path, json=body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        node.go_on.set()
        assert [future.result() for future in running] == [200, 200]
    assert client.post("/invoke/f", json=CALL).status_code == 200
    more = client.post("/v1/completions", json=CALL | {"model": "f", "n": 3})  # a call that is three generations
    assert more.status_code == 400, "never, with this policy"
    assert len(node.received) == 3


def test_a_flood_leaves_another_function_its_places(gateway: Running, client: httpx.Client, pirate: dict) -> None:
    assert client.post("/deploy/g", files=pirate).status_code == 201
    limits = {"limits": {"concurrent": 3}}
    assert gateway.client("admin").put(f"/tenants/{gateway.tenants['acme']}", json=limits).status_code == 200
    assert client.patch("/functions/f", json={"reserved_concurrency": 1}).status_code == 200
    (node,) = gateway.nodes
    node.script = hang_before_first

    def call(name: str) -> int:
        return client.post(f"/invoke/{name}", json=CALL).status_code

    with ThreadPoolExecutor(4) as pool:
        flood = [pool.submit(call, "g") for _ in range(2)]
        until_received(node, 2, flood)
        refused = client.post("/invoke/g", json=CALL)
        assert refused.status_code == 429
        assert "3 generations under way at once, 1 of which are reserved" in refused.json()["error"]["message"]
        kept = pool.submit(call, "f")
        until_received(node, 3, [*flood, kept])
        assert [request.reserved for request in node.received] == [0, 0, 1]
        more = client.post("/invoke/f", json=CALL)
        assert more.status_code == 429
        node.go_on.set()
        assert [future.result() for future in [*flood, kept]] == [200] * 3
    sums = client.patch("/functions/g", json={"reserved_concurrency": 3})
    assert (sums.status_code, sums.json()["error"]["message"]) == (
        409, "reserved_concurrency: 4 in total, but the tenant may have 3 generations at once",
    )  # fmt: skip
