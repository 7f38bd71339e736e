"""The administrators' routes: tenants, their limits and keys, as every gateway of a registry sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_gateway import Running, upload
from stub_node import hang_after_first

from adapters.local_store import LocalStore
from adapters.tenants import Limits, Tenants


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_a_tenants_life(gateway: Running, pirate: dict) -> None:
    admin, anyone = gateway.client("admin"), gateway.client(None)
    assert admin.get("/tenants/new").status_code == 404
    made = admin.put("/tenants/new", json={})
    assert made.status_code == 201
    assert made.json() == {
        "id": "new",
        "slo": {"ttft_ms": None, "tpot_ms": None, "attain": 0.99, "class": "standard"},
        "limits": {},
        "weight": 1.0,
        "webhook_hosts": [],
        "file_bytes": 10 << 30,
        "declared": False,
        "keys": [],
        "attainment": [],
    }
    key = admin.post("/tenants/new/keys")
    assert (key.status_code, key.headers["cache-control"]) == (201, "no-store")
    own = bearer(key.json()["key"])
    assert anyone.post("/deploy/f", files=pirate, headers=own).status_code == 201
    assert anyone.post("/invoke/f", json={"prompt": "x"}, headers=own).status_code == 200
    assert admin.put("/tenants/new", json={"limits": {"adapters": 7}}).status_code == 200
    seen = admin.get("/tenants/new")
    assert seen.json()["limits"] == {"adapters": 7}
    assert [entry["key_id"] for entry in seen.json()["keys"]] == [key.json()["key_id"]]
    assert key.json()["key"].rpartition("_")[2] not in seen.text, "a key is shown once"
    assert admin.put("/tenants/new", json=seen.json() and {"limits": {}}).json()["limits"] == {}

    assert admin.delete("/tenants/new").status_code == 204
    assert anyone.post("/invoke/f", json={"prompt": "x"}, headers=own).status_code == 401
    acting = {"x-garnish-tenant": "new"}
    for reply in (
        admin.get("/functions", headers=acting),
        admin.post("/invoke/f", json={"prompt": "x"}, headers=acting),
        admin.get("/tenants/new"),
        admin.delete("/tenants/new"),
        admin.post("/tenants/new/keys"),
    ):
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found")
    assert admin.put("/tenants/new", json={}).status_code == 201
    assert admin.get("/tenants/new").json()["keys"] == []
    assert admin.get("/functions", headers=acting).json()["functions"] == []
    assert anyone.get("/functions", headers=own).status_code == 401
    assert admin.post("/invoke/f", json={"prompt": "x"}, headers=acting).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/tenants/acme"), ("PUT", "/tenants/acme"), ("DELETE", "/tenants/acme")),
        *(("POST", "/tenants/acme/keys"), ("DELETE", "/tenants/acme/keys/000000000000")),
    ],
)
def test_only_for_administrators(shared_gateway: Running, method: str, path: str) -> None:
    assert shared_gateway.client(None).request(method, path, json={}).status_code == 401
    for other in (path, path.replace("acme", "nobody")):
        reply = shared_gateway.client("acme").request(method, other, json={})
        assert (reply.status_code, reply.json()["error"]["type"]) == (403, "forbidden")
    assert shared_gateway.client("acme").get("/functions").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"limits": {"rps": 0}}, "limits.rps"),
        ({"limits": {"tokens_per_minute": -5}}, "limits.tokens_per_minute"),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({"slo": {"class": "gold"}}, "slo.class"),
        ({"slo": {"slo_class": "strict"}}, "slo.slo_class"),
        ({"weight": 0}, "weight"),
        ({"weight": 1e9}, "weight"),
        ({"limits": {"adapters": 0}}, "limits.adapters"),
        ({"limits": {"adapters": 1.5}}, "limits.adapters"),
        ({"limits": {"bytes": -1}}, "limits.bytes"),
        ({"limits": {"other": 1}}, "limits.other"),
        ({"webhook_hosts": ["https://acme.example"]}, "webhook_hosts"),
        ({"webhook_hosts": ["10.0.0.0/33"]}, "webhook_hosts"),
        ({"webhook_hosts": ["a"] * 101}, "webhook_hosts"),
        ({"file_bytes": 0}, "file_bytes"),
        ({"other": 1}, "other"),
        ([], None),
    ],
)
def test_what_is_not_enforced_is_not_accepted(shared_gateway: Running, body: Any, param: str | None) -> None:
    reply = shared_gateway.client("admin").put("/tenants/acme", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (422, param)
    assert shared_gateway.client("admin").get("/tenants/acme").json()["limits"] == {}


def test_declared_tenants(gateway: Running) -> None:
    Tenants(LocalStore(Path(gateway.config.registry))).put("acme", declared=True)
    admin = gateway.client("admin")
    for reply in (admin.put("/tenants/acme", json={}), admin.delete("/tenants/acme")):
        assert (reply.status_code, reply.json()["error"]["type"]) == (409, "conflict")
    key = admin.post("/tenants/acme/keys").json()
    assert gateway.client(None).get("/functions", headers=bearer(key["key"])).status_code == 200
    assert admin.delete(f"/tenants/acme/keys/{key['key_id']}").status_code == 204
    assert gateway.client(None).get("/functions", headers=bearer(key["key"])).status_code == 401
    assert gateway.client("acme").get("/functions").status_code == 200


def test_limits_on_deploys(gateway: Running, stories_adapters: dict[str, Path]) -> None:
    admin, acme = gateway.client("admin"), gateway.client("acme")
    first, second = (upload(stories_adapters[name]) for name in sorted(stories_adapters)[:2])
    assert admin.put("/tenants/acme", json={"limits": {"adapters": 1}}).status_code == 200
    size = acme.post("/deploy/f", files=first).json()["bytes"]
    reply = acme.post("/deploy/g", files=second)
    assert (reply.status_code, reply.json()["error"]["type"]) == (409, "conflict")
    assert acme.post("/deploy/f", files=first).status_code == 200
    assert gateway.client("other").post("/deploy/g", files=second).status_code == 201
    assert admin.put("/tenants/acme", json={"limits": {"bytes": size}}).status_code == 200
    assert acme.post("/deploy/g", files=second).status_code == 409
    assert acme.delete("/functions/f").status_code == 204
    assert acme.post("/deploy/g", files=first).status_code == 201


def test_concurrent_generations(start: Callable[..., Running]) -> None:
    running = start(cache_seconds=0.0)
    node = running.node(hang_after_first)
    admin, acme, base = running.client("admin"), running.client("acme"), running.base.id
    admin.put("/tenants/acme", json={"limits": {"concurrent": 2}})
    call = {"prompt": "x", "stream": True}
    with (
        acme.stream("POST", f"/invoke/{base}", json=call) as one,
        acme.stream("POST", f"/invoke/{base}", json=call) as two,
    ):
        assert (one.status_code, two.status_code) == (200, 200)
        for body in ({"prompt": "x"}, call):
            refused = acme.post(f"/invoke/{base}", json=body)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limited")
            assert int(refused.headers["retry-after"]) >= 1
        node.go_on.set()
        assert running.client("other").post(f"/invoke/{base}", json={"prompt": "x"}).status_code == 200
        for stream in (one, two):
            assert "event: done" in stream.read().decode()
    chat = {"model": base, "prompt": "x", "max_tokens": 2}
    assert acme.post("/v1/completions", json=chat | {"n": 2}).status_code == 200
    assert acme.post("/v1/completions", json=chat | {"n": 3}).status_code == 400  # never, with this limit
    assert acme.post("/v1/completions", json=chat | {"prompt": ["a", "b", "c"]}).status_code == 400
    assert running.client("admin", **{"x-garnish-tenant": "acme"}).post(
        "/v1/completions", json=chat | {"n": 2}
    ).status_code == 200  # fmt: skip


def test_rates(start: Callable[..., Running]) -> None:
    running = start(cache_seconds=0.0)
    running.node()
    admin, acme, base = running.client("admin"), running.client("acme"), running.base.id
    limits = {"rps": 0.02, "tokens_per_minute": 1.0}
    assert admin.put("/tenants/acme", json={"limits": limits}).json()["limits"] == limits
    call = {"prompt": "x", "max_tokens": 2}
    assert acme.post(f"/invoke/{base}", json=call).status_code == 200, "a full bucket does for any call"
    for path, body in ((f"/invoke/{base}", call | {"stream": True}), ("/v1/completions", call | {"model": base})):
        refused = acme.post(path, json=body)
        assert refused.status_code == 429
        assert "per second" in refused.json()["error"]["message"]
        assert 40 <= int(refused.headers["retry-after"]) <= 50
    admin.put("/tenants/acme", json={"limits": {"tokens_per_minute": 1.0}})
    refused = acme.post(f"/invoke/{base}", json=call)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limited")
    assert "tokens per minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 60, "it went below empty"
    assert running.client("other").post(f"/invoke/{base}", json=call).status_code == 200
    found = admin.get("/metrics").text
    assert 'garnish_limited_total{limit="rps",tenant="acme"} 2.0' in found
    assert 'garnish_limited_total{limit="tokens",tenant="acme"} 1.0' in found


def test_tokens_that_were_not_used_are_given_back(start: Callable[..., Running]) -> None:
    running = start(cache_seconds=0.0)
    running.node()  # ends after 8 tokens, whatever may be used
    admin, acme, base = running.client("admin"), running.client("acme"), running.base.id
    admin.put("/tenants/acme", json={"limits": {"tokens_per_minute": 250}})
    for _ in range(3):
        assert acme.post(f"/invoke/{base}", json={"prompt": "x", "max_tokens": 200}).status_code == 200


def test_a_caller_who_goes_pays_for_what_was_computed(start: Callable[..., Running]) -> None:
    """Of a bucket that holds one token, and fills so slowly that Retry-After tells how far below empty it is."""
    running = start(cache_seconds=0.0)
    node = running.node(hang_after_first)
    admin, acme, path = running.client("admin"), running.client("acme"), f"/invoke/{running.base.id}"
    admin.put("/tenants/acme", json={"limits": {"tokens_per_minute": 1.0}})
    call = {"prompt": "x", "max_tokens": 200}
    with acme.stream("POST", path, json=call | {"stream": True}) as reply:
        assert next(reply.iter_lines()) == "event: token"
    assert node.disconnected.wait(30)
    prompt = len(node.received[0].token_ids)
    missing = 200
    while missing > prompt + 1:  # until the gateway has noticed, too
        refused = acme.post(path, json=call)
        assert refused.status_code == 429
        missing = round(int(refused.headers["retry-after"]) / 60)
    assert missing == prompt + 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_revoked_key_ends_on_every_gateway(
    start: Callable[..., Running], pirate: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What one gateway revokes, another may honour for a second and no longer, while the registry is there."""
    clock = Clock()
    monkeypatch.setattr("gateway.records.monotonic", clock)
    one, two = start(), start(tmp_dir=str(tmp_path / "second" / "uploads"))
    admin = one.client("admin")
    key = admin.post("/tenants/acme/keys").json()
    calls = [
        httpx.Client(base_url=running.url, headers=bearer(key["key"]), timeout=60, verify=False)
        for running in (one, two)
    ]
    assert [call.get("/functions").status_code for call in calls] == [200, 200]
    assert admin.delete(f"/tenants/acme/keys/{key['key_id']}").status_code == 204
    assert calls[0].get("/functions").status_code == 401, "at once where it was revoked"
    clock.now += 1.0
    assert calls[1].get("/functions").status_code == 401
    assert one.client("acme").get("/functions").status_code == 200

    assert two.client("other").get("/functions").status_code == 200
    acting = two.client("admin", **{"x-garnish-tenant": "other"})
    assert acting.get("/functions").status_code == 200
    assert admin.delete("/tenants/other").status_code == 204
    clock.now += 1.0
    assert two.client("other").get("/functions").status_code == 401
    assert acting.get("/functions").status_code == 404
    for call in calls:
        call.close()


def test_racing_keys(gateway: Running) -> None:
    admin = gateway.client("admin")
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(admin.post("/tenants/acme/keys"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({reply.json()["key"] for reply in replies}) == 8
    assert all(gateway.client(None).get("/functions", headers=bearer(r.json()["key"])).is_success for r in replies)


IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6) | st.sampled_from(
    ["..", "%2e%2e", "a/b", "A", "a" * 65, "a\n", "tenant.json", "-a", "a%00", "acme%0a", "nobody"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=IDS, method=st.sampled_from(["GET", "PUT", "DELETE"]), key_id=st.none() | IDS)
def test_ids_that_name_nothing(gateway: Running, name: str, method: str, key_id: str | None) -> None:
    """Whatever is put where an id belongs: a clear answer, and nothing but tenants of that name comes of it."""
    store = LocalStore(Path(gateway.config.registry))
    before = {info.key for info in store.list("")}
    path = f"/tenants/{name}" if key_id is None else f"/tenants/{name}/keys/{key_id}"
    target = httpx.URL(gateway.url).copy_with(raw_path=_quoted(path))
    with httpx.Client(headers=bearer(gateway.keys["admin"]), timeout=60, verify=False) as client:
        reply = client.request("DELETE" if key_id else method, target, json={})
    assert reply.status_code in (200, 201, 204, 307, 404, 405), reply.text
    made = {info.key for info in store.list("")} - before
    assert made <= {f"tenants/{name}/tenant.json"}
    assert store.get("tenants/acme/tenant.json")
    assert Tenants(store).verify(gateway.keys["acme"]) is not None


def _quoted(path: str) -> bytes:
    return b"".join(
        bytes([byte]) if byte < 128 and (chr(byte).isalnum() or byte in b"/%.-_") else b"%%%02X" % byte
        for byte in path.encode()
    )


def test_a_limit_from_the_service_file_holds_with_no_keys(start: Callable[..., Running]) -> None:
    running = start(auth="none", cache_seconds=0.0)
    running.node()
    client = running.client(None)
    assert client.post(f"/invoke/{running.base.id}", json={"prompt": "x"}).status_code == 200
    Tenants(LocalStore(Path(running.config.registry))).put("default", declared=True, limits=Limits(concurrent=1))
    reply = client.post("/v1/completions", json={"model": running.base.id, "prompt": "x", "n": 2})
    assert reply.status_code == 400
