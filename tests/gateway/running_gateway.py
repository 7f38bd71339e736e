"""A served gateway with its keys and stub nodes, as tests handle it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from served_app import served
from stub_node import Script, StubNode, echo, stub_node

from adapters.base_model import BaseModel, load_base_model
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from cluster.secret import create_secret
from gateway.app import create_app
from gateway.config import GatewayConfig


def plain_client(url: str, headers: dict[str, str] | None = None) -> httpx.Client:
    """For a gateway without TLS: to read the certificates of all authorities takes longer than most tests."""
    return httpx.Client(base_url=url, headers=headers, timeout=60, verify=False)


@dataclass
class Running:
    """A served gateway, its keys and its stub nodes."""

    config: GatewayConfig
    base: BaseModel
    secret: str
    keys: dict[str, str]
    stack: ExitStack
    url: str = ""
    nodes: list[StubNode] = field(default_factory=list)

    def client(self, key: str | None = "acme", **headers: str) -> httpx.Client:
        """An HTTP client with the key of `key` (a tenant or `admin`); None: without one."""
        if key is not None:
            headers["authorization"] = f"Bearer {self.keys[key]}"
        return self.stack.enter_context(plain_client(self.url, headers))

    def node(self, script: Script = echo, node_id: str | None = None, publish: bool = True, **record: Any) -> StubNode:
        node = StubNode(
            node_id or f"node-{len(self.nodes)}", self.base.fingerprint, self.secret, self.base.max_context, script
        )
        self.stack.enter_context(stub_node(node))
        self.nodes.append(node)
        if publish:
            assert node.publish(self.url, **record).status_code == 204
        return node


def start_gateway(stack: ExitStack, model: Path, folder: Path, **changed: Any) -> Running:
    """A gateway over a registry in `folder`, with an admin key and the tenants `acme` and `other`; its nodes' records
    never expire within a test. `changed`: fields of GatewayConfig. It is stopped when the stack is closed."""
    tenants = Tenants(LocalStore(folder / "registry"))
    keys = {"admin": tenants.add_key(None, "start")[0]}
    for tenant in ("acme", "other"):
        tenants.put(tenant)
        keys[tenant] = tenants.add_key(tenant)[0]
    secret_file = folder / "secret" / "cluster.secret"
    secret = create_secret(secret_file)
    config = GatewayConfig(
        model_dir=str(model),
        base_id="stories260K",
        registry=str(folder / "registry"),
        secret_file=str(secret_file),
        tmp_dir=str(folder / "uploads"),
        record_expiry=600.0,
        node_silence=600.0,
    )
    config = msgspec.structs.replace(config, **changed)
    running = Running(config, load_base_model(model, "stories260K"), secret, keys, stack)
    running.url = stack.enter_context(served(create_app(config)))
    return running


def upload(folder: Path) -> dict[str, Any]:
    return {name: (name, (folder / name).read_bytes()) for name in ("adapter_config.json", "adapter_model.safetensors")}


def until(condition: Callable[[], bool]) -> None:
    """A test's own time limit bounds it."""
    while not condition():
        time.sleep(0.01)


def until_received(node: StubNode, count: int, calls: Iterable[Future[Any]]) -> None:
    """Fails when one of the calls ends before the node has received so many."""
    while len(node.received) < count:
        assert not any(call.done() for call in calls)
        time.sleep(0.01)
