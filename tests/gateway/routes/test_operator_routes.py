"""What operators and nodes use: records, /nodes, /metrics, /readyz, function lists, openapi.json."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families
from running_gateway import Running, plain_client, upload

import gateway.routes
from adapters.local_store import LocalStore
from cluster.messages import PROTOCOL_VERSION
from cluster.news import Resident, full_report
from cluster.secret import authorization
from gateway.app import ROUTES
from gateway.routes import console, docs
from gateway.routes.all_routes import CALLED, OPERATED
from gateway.routes.functions import FunctionReply, Residency, VersionList, VersionReply
from gateway.routes.nodes import NodeList
from gateway.routes.openapi import FILE, document, render
from gateway.workers.called import CalledDigests


def samples(running: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = running.client("admin").get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_ready_only_with_a_ready_node(start: Callable[..., Running]) -> None:
    running = start()
    client = running.client(None)
    reply = client.get("/readyz")
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "unavailable"
    assert [entry["check"] for entry in reply.json()["error"]["details"]] == ["nodes"]
    node = running.node(state="warming")
    assert "warming" in client.get("/readyz").json()["error"]["details"][0]["problem"]
    node.publish(running.url)
    assert client.get("/readyz").json()["status"] == "ready"
    assert client.get("/healthz").json() == {"status": "alive"}


def test_records_need_the_secret(reused: Running) -> None:
    body = msgspec.msgpack.encode(full_report(reused.nodes[0].record()))
    for headers in ({}, authorization("x" * 43), authorization(reused.keys["admin"])):
        reply = httpx.post(f"{reused.url}/cluster/record", content=body, headers=headers, timeout=60, verify=False)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "unauthenticated")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"id": 1}), b"\x91" * 100_000])
def test_records_that_are_none(reused: Running, body: bytes) -> None:
    with plain_client(reused.url, authorization(reused.secret)) as client:
        reply = client.post("/cluster/record", content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request")


def test_records_of_another_version_or_size(reused: Running) -> None:
    for v in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        reply = reused.nodes[0].publish(reused.url, v=v)
        assert reply.status_code == 400
        assert (
            reply.json()["error"]["message"] == f"message version {v} is not supported; supported: {PROTOCOL_VERSION}"
        )
    assert reused.nodes[0].publish(reused.url, error="x" * (5 << 20)).status_code == 413


def test_nodes_as_the_scheduler_sees_them(gateway: Running) -> None:
    gateway.node(state="draining", running=3)
    nodes = msgspec.json.decode(gateway.client("admin").get("/nodes").content, type=NodeList).nodes
    assert [(node.record["id"], node.record["state"]) for node in nodes] == [
        ("node-0", "ready"),
        ("node-1", "draining"),
    ]
    assert nodes[1].record["running"] == 3


def test_metrics(gateway: Running, pirate: dict) -> None:
    client = gateway.client()
    client.post("/deploy/f", files=pirate)
    client.post("/invoke/f", json={"prompt": "x", "max_tokens": 3})
    client.post("/invoke/nobody", json={"prompt": "x"})
    found = samples(gateway)
    owner = frozenset({("tenant", "acme"), ("function", "f")})
    assert found["garnish_invocations_total", owner | {("outcome", "ok")}] == 1
    assert found["garnish_tokens_total", owner | {("kind", "completion")}] == 3
    assert found["garnish_ttft_seconds_count", owner] == 1
    assert found["garnish_cold_starts_total", frozenset({("tier", "host"), ("plan", "wait")})] == 1
    assert found["garnish_requests_total", frozenset({("route", "invoke"), ("status", "404")})] == 1
    assert found["garnish_nodes", frozenset({("state", "ready")})] == 1
    assert found["garnish_open_invocations", frozenset()] == 0


def test_one_function(reused: Running, pirate: dict) -> None:
    client = reused.client()
    digest = client.post("/deploy/f", files=pirate).json()["digest"]
    client.post("/invoke/f", json={"prompt": "x", "max_tokens": 3})
    reused.nodes[0].publish(reused.url, residents=[Resident(digest=digest, tier="device", bytes=9, in_use=1)])
    body = msgspec.json.decode(client.get("/functions/f").content, type=FunctionReply)
    assert [version.version for version in body.versions] == [1]
    assert body.aliases == {"latest": 1}
    assert body.residency == [Residency(version=1, node="node-0", tier="device")]
    assert (body.last_hour.invocations, body.last_hour.failures, body.last_hour.completion_tokens) == (1, 0, 3)
    assert body.last_hour.mean_ttft_ms is not None
    versions = msgspec.json.decode(client.get("/functions/f/versions").content, type=VersionList).versions
    one = msgspec.json.decode(client.get("/functions/f/versions/1").content, type=VersionReply)
    assert versions == [one]
    assert (one.digest, one.base_id) == (digest, "stories260K")
    for version in ("2", "x", "0", "1e0", "99999999999999"):
        assert client.get(f"/functions/f/versions/{version}").status_code == 404


def test_residency_tells_nothing_of_other_tenants(reused: Running, pirate: dict) -> None:
    """Equal files have one digest: who has not called it can't see that somebody else does."""
    acme, other = reused.client("acme"), reused.client("other")
    digest = acme.post("/deploy/f", files=pirate).json()["digest"]
    assert other.post("/deploy/g", files=pirate).json()["digest"] == digest
    assert acme.post("/invoke/f", json={"prompt": "x"}).status_code == 200
    reused.nodes[0].publish(reused.url, residents=[Resident(digest=digest, tier="device", bytes=9, in_use=3)])
    seen = [{"version": 1, "node": "node-0", "tier": "device"}]

    def residencies(client: httpx.Client, name: str) -> list[object]:
        return [client.get(f"/functions/{name}").json()["residency"]] + [
            item["residency"] for item in client.get("/functions").json()["functions"]
        ]

    assert residencies(acme, "f") == [seen, seen]
    assert residencies(other, "g") == [[], []]
    assert other.post("/invoke/g", json={"prompt": "x"}).status_code == 200
    assert residencies(other, "g") == [seen, seen]


def test_called_digests_are_bounded_per_tenant() -> None:
    called = CalledDigests(max_tenants=2, max_digests=2)
    for digest in ("a", "b", "a", "c"):
        called.record("t", digest)
    called.record("u", "a")
    assert [called.has("t", digest) for digest in "abc"] == [True, False, True]
    assert [called.has("u", digest) for digest in "abc"] == [True, False, False]
    called.record("v", "a")
    assert (called.has("t", "a"), called.has("u", "a"), called.has("v", "a")) == (False, True, True)


def test_pages_of_functions(reused: Running, stories_adapters: dict[str, Path]) -> None:
    client = reused.client()
    names = [f"f{index}" for index in range(5)]
    for name in names:
        assert client.post(f"/deploy/{name}", files=upload(stories_adapters["pirate"])).status_code == 201
    seen: list[str] = []
    after = ""
    for _ in range(10):
        page = client.get("/functions", params={"limit": 2, "after": after}).json()
        assert len(page["functions"]) <= 2
        seen += [item["name"] for item in page["functions"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert seen == names
    assert page["functions"][-1]["ranks"] == [8] if page["functions"] else True


def test_delete(reused: Running, pirate: dict) -> None:
    client = reused.client()
    client.post("/deploy/f", files=pirate)
    assert client.post("/invoke/f", json={"prompt": "x"}).status_code == 200
    reply = client.delete("/functions/f")
    assert (reply.status_code, reply.content) == (204, b"")
    assert client.post("/invoke/f", json={"prompt": "x"}).status_code == 404
    assert client.get("/functions/f").status_code == 404
    assert client.delete("/functions/f").status_code == 404
    again = client.post("/deploy/f", files=pirate)
    assert (again.status_code, again.json()["version"]) == (201, 2)  # numbers are never used twice


def test_the_committed_document_is_the_generated_one() -> None:
    assert FILE.read_bytes() == render(), "run: python -m gateway.routes.openapi"


def test_the_document_is_valid_and_served(reused: Running) -> None:
    served = reused.client(None).get("/openapi.json")
    assert served.json() == json.loads(FILE.read_bytes())
    validate(served.json())


def test_every_public_route_is_in_the_document() -> None:
    listed = {(path, method.upper()) for path, item in document()["paths"].items() for method in item}
    hidden = {("/cluster/record", "POST"), ("/cluster/base", "POST"), ("/openapi.json", "GET")}
    hidden |= {(route.path, "GET") for route in (*docs.routes, *console.routes) if not route.summary}  # files of pages
    routed = {(route.path.replace(":path", ""), method) for route in ROUTES for method in route.methods - {"HEAD"}}
    assert routed - hidden == listed


@pytest.mark.parametrize("after", ["../x", "A", "\0", "a" * 65, "\ud7ff"])
def test_pages_begin_where_others_ended(reused: Running, after: str) -> None:
    reply = reused.client().get("/functions", params={"after": after})
    assert (reply.status_code, reply.json()["error"]["param"]) == (422, "after")


def test_whoever_asks_for_readiness_costs_the_store_nothing(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(cache_seconds=3600.0)
    running.node()
    asked: list[str] = []
    head = LocalStore.head
    monkeypatch.setattr(LocalStore, "head", lambda store, key: asked.append(key) or head(store, key))
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: running.client(None).get("/readyz").status_code, range(40)))
    assert (replies, len(asked)) == ([200] * 40, 1)


def test_every_module_of_routes_is_served() -> None:
    """One that is missing from the list would answer 404, and nothing else would say so."""
    found = {
        module.name
        for module in pkgutil.iter_modules(gateway.routes.__path__)
        if hasattr(importlib.import_module(f"gateway.routes.{module.name}"), "routes")
    }
    assert found == {module.__name__.rpartition(".")[2] for module in (*CALLED, *OPERATED)}
