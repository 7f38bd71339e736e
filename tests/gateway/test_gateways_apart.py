"""Gateways that share a registry and no Redis, or one that is away: what one of them changes the other sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from settled import settle
from stub_node import echo, hang_after_first, stub_node
from test_gateway_server import config, node_of, process, wait_for  # noqa: F401  (config is a fixture)
from test_gateway_workers import stream

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.local_store import LocalStore
from adapters.registry import Registry
from adapters.tenants import Tenants
from gateway.config import GatewayConfig
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, redis_server

CALL = {"prompt": "x", "max_tokens": 1}
SOON = 20.0
"""Far less than what is believed without a word from anyone, and far more than a second."""


@dataclass
class Apart:
    """Two gateways over one settled registry with two versions of `f`; `live` is the first."""

    one: httpx.Client
    two: httpx.Client
    admin: str
    key_id: str
    """Of the key that both clients send."""


@pytest.fixture
def start(
    config: GatewayConfig,  # noqa: F811
    stories_adapters: dict[str, Path],
    tmp_path: Path,
) -> Iterator[Callable[..., Apart]]:
    """start(redis one, redis two, what nodes answer)"""
    with ExitStack() as stack:

        def begin(redis: tuple[RedisServer, RedisServer], script: Any) -> Apart:
            store = LocalStore(Path(config.registry))
            tenants = Tenants(store)
            tenants.put("acme")
            (key, record), admin = tenants.add_key("acme"), tenants.add_key(None, "start")[0]
            registry = Registry(store, load_base_model(Path(config.model_dir), config.base_id))
            for name in ("pirate", "space"):
                folder = stories_adapters[name]
                told = (folder / "adapter_config.json").read_bytes()
                registry.deploy("acme", "f", AdapterUpload(told, folder / "adapter_model.safetensors"))
            registry.changes.set_alias("acme", "f", "live", {"1": 1.0})
            settle(store)
            clients = [_gateway(stack, config, tmp_path / str(number), redis[number], script) for number in range(2)]
            for client in clients:
                client.headers["authorization"] = f"Bearer {key}"
            return Apart(*clients, admin, record.key_id)

        yield begin


def _gateway(stack: ExitStack, common: GatewayConfig, folder: Path, redis: RedisServer, script: Any) -> httpx.Client:
    """Ready to serve, by a node of its own."""
    folder.mkdir()
    port = free_port()
    uploads, usage = str(folder / "uploads"), str(folder / "usage")
    own = msgspec.structs.replace(common, port=port, tmp_dir=uploads, usage_dir=usage, auth="keys", redis=redis.url)
    url = f"http://127.0.0.1:{port}"
    child = stack.enter_context(process(own, folder / "log"))
    node = stack.enter_context(stub_node(node_of(own, script)))
    wait_for(url, "/healthz", child)
    assert node.publish(url).status_code == 204
    client = stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=False))
    soon(lambda: client.get("/readyz").status_code == 200)
    return client


def soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    with ExitStack() as stack:
        made = []
        for name in ("redis-one", "redis-two"):
            (tmp_path / name).mkdir()
            made.append(stack.enter_context(redis_server(tmp_path / name)))
        yield made[0], made[1]


def version(client: httpx.Client, target: str) -> int:
    return int(client.post(f"/invoke/{target}", json=CALL).raise_for_status().json()["version"])


def test_a_gateway_on_another_redis_sees_changes(
    start: Callable[..., Apart], servers: tuple[RedisServer, RedisServer]
) -> None:
    apart = start(servers, echo)
    admin = {"authorization": f"Bearer {apart.admin}"}
    assert version(apart.two, "f:live") == 1
    apart.one.put("/functions/f/aliases/live", json={"version": 2}).raise_for_status()
    soon(lambda: version(apart.two, "f:live") == 2)
    apart.one.delete(f"/tenants/acme/keys/{apart.key_id}", headers=admin).raise_for_status()
    soon(lambda: apart.two.post("/invoke/f", json=CALL).status_code == 401)


def test_a_forced_delete_ends_streams_of_a_gateway_on_another_redis(
    start: Callable[..., Apart], servers: tuple[RedisServer, RedisServer]
) -> None:
    apart = start(servers, hang_after_first)
    with stream(apart.two, "/invoke/f") as events:
        assert apart.one.delete("/functions/f?force=true").status_code == 204
        assert next(events).json()["error"]["type"] == "cancelled"


def test_a_forced_delete_ends_streams_while_redis_is_away(
    start: Callable[..., Apart], servers: tuple[RedisServer, RedisServer]
) -> None:
    """It stays away until the stream has ended: nothing was told through it."""
    shared = servers[0]
    apart = start((shared, shared), hang_after_first)
    with stream(apart.two, "/invoke/f") as events:
        shared.kill()
        assert apart.one.delete("/functions/f?force=true").status_code == 204
        assert next(events).json()["error"]["type"] == "cancelled"
