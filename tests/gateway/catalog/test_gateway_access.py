"""Keys and tenants: who may see and do what."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from running_gateway import Running

from adapters.keys import new_key
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from gateway.config import ConfigError, GatewayConfig, check_config

KEYED = ["/functions", "/functions/f", "/v1/models", "/v1/models/f", "/metrics", "/nodes", "/functions/f/versions"]


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.mark.parametrize("path", KEYED)
def test_no_key_and_wrong_keys(gateway: Running, path: str) -> None:
    client = gateway.client(None)
    real = gateway.keys["acme"]
    stranger = new_key("acme")[0]
    nobody = new_key("nobody")[0]
    for headers in (
        {},
        {"authorization": f"Basic {real}"},
        {"authorization": "Bearer nonsense"},
        {"authorization": f"Bearer {real[:-1]}"},
        {"authorization": f"Bearer {stranger}"},
        {"x-api-key": nobody},
        {"x-api-key": "x" * 10_000},
        {b"x-api-key": b"\xff\xfe"},
    ):
        reply = client.get(path, headers=headers)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        error = reply.json()["error"]
        assert error.get("code", error["type"]) == ("invalid_api_key" if path.startswith("/v1") else "unauthenticated")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json"])
def test_open_routes(gateway: Running, path: str) -> None:
    assert gateway.client(None).get(path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/nodes"])
def test_admin_routes(gateway: Running, path: str) -> None:
    assert gateway.client("admin").get(path).status_code == 200
    reply = gateway.client("acme").get(path)
    assert (reply.status_code, reply.json()["error"]["type"]) == (403, "forbidden")


def test_another_tenants_function_does_not_exist(gateway: Running, pirate: dict) -> None:
    acme, other = gateway.client("acme"), gateway.client("other")
    assert acme.post("/deploy/f", files=pirate).status_code == 201
    for method, path in [
        ("GET", "/functions/{}"),
        ("DELETE", "/functions/{}"),
        ("GET", "/functions/{}/versions"),
        ("GET", "/functions/{}/versions/1"),
        ("POST", "/invoke/{}"),
        ("GET", "/v1/models/{}"),
    ]:
        theirs = other.request(method, path.format("f"), json={"prompt": "x"})
        nobodys = other.request(method, path.format("g"), json={"prompt": "x"})
        assert theirs.status_code == nobodys.status_code == 404
        shown = theirs.text.replace(theirs.headers["x-request-id"], "").replace("'f'", "'g'").replace("`f`", "`g`")
        assert shown == nobodys.text.replace(nobodys.headers["x-request-id"], "")
    assert other.get("/functions").json()["functions"] == []
    assert other.post("/deploy/f", files=pirate).json()["version"] == 1
    assert acme.post("/invoke/f", json={"prompt": "x"}).status_code == 200


def test_an_admin_acts_for_a_tenant(gateway: Running, pirate: dict) -> None:
    admin = gateway.client("admin")
    reply = admin.get("/functions")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-garnish-tenant")
    for_acme = {"x-garnish-tenant": gateway.tenants["acme"]}
    assert admin.post("/deploy/f", files=pirate, headers=for_acme).status_code == 201
    assert gateway.client("acme").get("/functions/f").status_code == 200
    assert admin.get("/functions", headers={"x-garnish-tenant": "nobody"}).status_code == 404
    assert admin.get("/functions", headers={"x-garnish-tenant": "../acme"}).status_code == 404
    assert gateway.client("other").get("/functions", headers=for_acme).status_code == 403
    assert gateway.client("acme").get("/functions", headers=for_acme).status_code == 200


def test_a_revoked_key_ends_and_a_new_one_begins(start: Callable[..., Running]) -> None:
    running = start(cache_seconds=0.0)
    client = running.client("acme")
    assert client.get("/functions").status_code == 200
    tenants = Tenants(LocalStore(Path(running.config.registry)))
    text, record = tenants.add_key("acme")
    assert running.client(None).get("/functions", headers={"x-api-key": text}).status_code == 200
    tenants.revoke_key("acme", record.key_id)
    assert running.client(None).get("/functions", headers={"x-api-key": text}).status_code == 401
    assert client.get("/functions").status_code == 200


def test_without_keys_on_loopback(start: Callable[..., Running], pirate: dict) -> None:
    running = start(auth="none")
    running.node()
    client = running.client(None)
    assert client.post("/deploy/f", files=pirate).status_code == 201
    assert client.post("/invoke/f", json={"prompt": "x"}).status_code == 200
    assert client.get("/nodes").status_code == 200


def test_known_keys_and_names_outlive_the_registry(start: Callable[..., Running], pirate: dict) -> None:
    running = start(cache_seconds=0.0)
    running.node()
    client = running.client()
    client.post("/deploy/f", files=pirate)
    assert client.post("/invoke/f", json={"prompt": "x"}).status_code == 200
    registry = Path(running.config.registry)
    shutil.move(registry, registry.with_name("away"))
    registry.symlink_to(registry)  # every look into it fails, as a lost mount's would
    assert client.post("/invoke/f", json={"prompt": "x"}).status_code == 200
    for reply in (client.get("/functions"), client.post("/invoke/other", json={"prompt": "x"})):
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "unavailable")
        assert str(registry) not in reply.text
    assert running.client("other").get("/functions").status_code == 503
    ready = running.client(None).get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["error"]["details"][0]["check"] == "store"
    registry.unlink()
    shutil.move(registry.with_name("away"), registry)
    assert client.get("/functions").status_code == 200
    assert running.client(None).get("/readyz").status_code == 200


def config(**changed: object) -> GatewayConfig:
    fixed = {"model_dir": "m", "base_id": "b", "registry": "r", "secret_file": "s", "tmp_dir": "t"}
    return GatewayConfig(**{**fixed, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_open_gateways_on_loopback(host: str) -> None:
    check_config(config(auth="none", host=host))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"auth": "none", "host": "0.0.0.0"}, "auth"),
        ({"auth": "none", "host": "::"}, "auth"),
        ({"auth": "none", "host": "example.org"}, "auth"),
        ({"workers": 2}, "workers: 2 need `redis`"),
        ({"workers": 0, "redis": "redis://127.0.0.1"}, "workers"),
        ({"workers": 2, "redis": "http://:word@127.0.0.1"}, "redis: expected redis://"),
        ({"call_body": 0}, "call_body"),
        ({"request_timeout": 10_000.0}, "request_timeout"),
    ],
)
def test_settings_that_do_not_go_together(changed: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_config(config(**changed))


def test_without_keys_no_other_sites_page_may_call(start: Callable[..., Running], pirate: dict) -> None:
    running = start(auth="none")
    running.node()
    client = running.client(None)
    assert client.post("/deploy/f", files=pirate).status_code == 201
    port = running.url.rpartition(":")[2]
    refused = [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": f"http://localhost:{port}"},  # not the Host of this request, which is 127.0.0.1
        {"origin": "http://127.0.0.1:3000"},
        {"origin": f"http://127.0.0.1:{port}.evil.example"},
        {"host": "evil.example"},
        {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"},  # a rebound name
        {"host": "127.0.0.1.evil.example"},
        {"host": "[::1"},
        {"host": ""},
    ]
    simple = {"content-type": "text/plain"}  # what a page may send without asking
    for headers in refused:
        for reply in (
            client.post("/invoke/f", content=b'{"prompt": "x"}', headers=headers | simple),
            client.post("/v1/completions", json={"model": "f", "prompt": "x"}, headers=headers),
            client.post("/deploy/g", files=pirate, headers=headers),
            client.delete("/functions/f", headers=headers),
            client.get("/functions", headers=headers),
            client.get("/nodes", headers=headers),
        ):
            assert reply.status_code == 403, (headers, reply.request.url)
            assert "`auth` is `none`" in reply.json()["error"]["message"]
    served = [
        {},
        {"host": f"localhost:{port}"},
        {"host": "[::1]:8080"},
        {"host": "127.8.8.8"},
        {"origin": f"http://127.0.0.1:{port}"},
        {"host": "LocalHost:9", "origin": "http://localhost:9"},
    ]
    for headers in served:
        assert client.post("/invoke/f", json={"prompt": "x"}, headers=headers).status_code == 200


def test_with_keys_host_and_origin_are_free(gateway: Running) -> None:
    headers = {"host": "garnish.example", "origin": "https://app.example"}
    assert gateway.client().get("/functions", headers=headers).status_code == 200
