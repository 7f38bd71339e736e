"""Every route of openapi.json that a tenant's key may use has a limit: it is listed, and holds at a real gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from running_gateway import Running

from adapters.tenants import Limits, Tenant
from gateway.http.rates import MIN_TEXT_BYTES
from gateway.routes.openapi import DOCUMENTED, FILE

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "tenants.md"
RATES = ("rps", "text_bytes_per_second", "reads_per_second", "writes_per_second")
SLOW = 0.001
"""A bucket of such a rate allows one request, and the next one a quarter of an hour later."""
IN_PATH = {"target": "stories260K", "name": "none", "id": "inv_none", "alias": "latest", "version": "1"}


def operations() -> dict[str, dict[str, Any]]:
    """The operations of openapi.json, by method and path."""
    paths = json.loads(FILE.read_bytes())["paths"]
    return {f"{method.upper()} {path}": each for path, methods in paths.items() for method, each in methods.items()}


def is_tenants(operation: dict[str, Any]) -> bool:
    """Whether a tenant's key may use it."""
    admins = operation["summary"].endswith("; admin key")
    return operation.get("security") != [] and not admins


TENANTS = {name: each for name, each in operations().items() if is_tenants(each)}


def test_each_route_of_a_tenant_has_a_rate() -> None:
    assert len(TENANTS) > 30
    for name, operation in TENANTS.items():
        limits = operation.get("x-garnish-limits", [])
        assert limits and limits[0] in RATES, f"{name} has no limit"
        assert set(limits) <= {*Limits.__struct_fields__, *Tenant.__struct_fields__}, name
    others = {name for name, each in operations().items() if name not in TENANTS and "x-garnish-limits" in each}
    assert not others, "no tenant's key is accepted there"
    assert all(each.rate is None or each.key for each in DOCUMENTED)


def test_routes_that_store_have_a_limit_of_what_is_stored() -> None:
    stored = {
        "POST /deploy/{name}": {"adapters", "bytes"},
        "POST /invoke/{target}": {"stored_calls", "stored_call_bytes"},
        "POST /v1/files": {"file_bytes"},
        "POST /v1/batches": {"file_bytes"},
    }
    for name, limits in stored.items():
        assert limits <= set(TENANTS[name]["x-garnish-limits"])


def test_the_page_on_tenants_lists_each_limit() -> None:
    listed = PAGE.read_text()
    for limit in {limit for each in TENANTS.values() for limit in each["x-garnish-limits"]}:
        assert f"`{limit}`" in listed, limit


@pytest.mark.parametrize("name", TENANTS)
def test_each_route_is_refused_beyond_its_rate(name: str, reused: Running) -> None:
    """Whatever it answers within its rate; and another tenant is still served."""
    method, path = name.split(" ")
    limit = TENANTS[name]["x-garnish-limits"][0]
    for part, value in IN_PATH.items():
        path = path.replace(f"{{{part}}}", value)
    path = path.replace("{file_id}", "file-none").replace("{batch_id}", "batch_none")
    settings = {"limits": {limit: SLOW}}
    tenant = reused.tenants["acme"]
    reused.client("admin").put(f"/tenants/{tenant}", json=settings).raise_for_status()
    first, second, other = (
        reused.client(key).request(method, path, headers={"content-type": "application/json"}, content=b"")
        for key in ("acme", "acme", "other")
    )
    assert first.status_code != 429, first.text
    assert second.status_code == 429, second.text
    error = second.json()["error"]
    assert error.get("code", error["type"]) in ("rate_limited", "rate_limit_exceeded")
    assert f"limits.{limit}" in error["message"]
    assert int(second.headers["retry-after"]) > 500
    assert other.status_code == first.status_code
    metrics = reused.client("admin").get("/metrics").text
    assert f'garnish_limited_total{{limit="{limit}",tenant="{tenant}"}} 1.0' in metrics


def limited(running: Running, **limits: Any) -> httpx.Client:
    tenant = running.tenants["acme"]
    running.client("admin").put(f"/tenants/{tenant}", json={"limits": limits}).raise_for_status()
    return running.client("acme")


def test_asynchronous_calls_are_counted_when_they_are_submitted(reused: Running) -> None:
    client, path = limited(reused, rps=5), f"/invoke/{reused.base.id}"
    call = {"prompt": "x", "max_tokens": 1, "background": True}
    replies = [client.post(path, json=call) for _ in range(40)]
    accepted = [reply.json()["id"] for reply in replies if reply.status_code == 202]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert len(accepted) + len(refused) == 40
    assert len(refused) > 20
    assert {reply.json()["error"]["type"] for reply in refused} == {"rate_limited"}
    assert all("retry-after" in reply.headers for reply in refused)


def test_a_submitted_call_pays_once(start: Callable[..., Running]) -> None:
    """Its run is not refused by the rate that its submission has used up."""
    running = start(cache_seconds=0.0)
    running.node()
    client = limited(running, rps=SLOW)
    call = {"prompt": "x", "max_tokens": 1, "background": True}
    event = client.post(f"/invoke/{running.base.id}", json=call)
    assert event.status_code == 202, event.text
    while (found := client.get(f"/invocations/{event.json()['id']}").json())["state"] in ("queued", "running"):
        pass
    assert found["state"] == "succeeded", found


def test_ended_calls_count_as_stored(reused: Running) -> None:
    client, path = limited(reused, stored_calls=3), f"/invoke/{reused.base.id}"
    call = {"prompt": "x", "max_tokens": 1, "background": True}
    ids = [client.post(path, json=call).raise_for_status().json()["id"] for _ in range(3)]
    for event_id in ids:
        while client.get(f"/invocations/{event_id}").json()["ended"] is None:
            pass
    refused = client.post(path, json=call)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limited")
    assert "limits.stored_calls" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert client.post(path, json=call | {"background": False}).status_code == 200, "it is not stored"
    assert reused.client("other").post(path, json=call).status_code == 202


def test_stored_calls_are_bounded_in_bytes(reused: Running) -> None:
    client, path = limited(reused, stored_call_bytes=5000), f"/invoke/{reused.base.id}"
    call = {"prompt": "x", "max_tokens": 1, "background": True, "stop": ["y" * 200] * 10}
    statuses = [client.post(path, json=call).status_code for _ in range(4)]
    assert statuses == [202, 429, 429, 429] or statuses == [202, 202, 429, 429]


def test_texts_to_tokenize_are_counted_in_bytes(reused: Running) -> None:
    client = limited(reused, text_bytes_per_second=10 * MIN_TEXT_BYTES)
    long = {"prompt": "word " * 20_000}
    assert client.post("/tokenize", json=long).status_code == 200, "a full bucket does for any text"
    refused = client.post("/tokenize", json={"prompt": "x"})
    assert refused.status_code == 429
    assert 8 <= int(refused.headers["retry-after"]) <= 10, "100 kB at 10 kB per second"
    assert client.post("/detokenize", json={"tokens": [1]}).status_code == 429
    assert client.get("/functions").status_code == 200


def test_limits_of_work_outside_calls_have_defaults(reused: Running) -> None:
    client = limited(reused)
    text = {"prompt": "word " * 180_000}
    statuses = [client.post("/tokenize", json=text).status_code for _ in range(4)]
    assert statuses[0] == 200
    assert 429 in statuses
    assert msgspec.json.decode(b"{}", type=Limits).writes_per_second == 100
