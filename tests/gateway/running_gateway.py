"""A served gateway with its keys and stub nodes, as tests handle it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
from served_app import served
from stub_node import Script, StubNode, echo, stub_node

from adapters.base_manifest import find_base
from adapters.base_model import BaseModel
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
    tenants: dict[str, str] = field(default_factory=lambda: {"acme": "acme", "other": "other"})
    """The names of the tenants that the keys `acme` and `other` belong to."""
    nodes_before: int = 0
    """That other tests have named already."""

    def client(self, key: str | None = "acme", **headers: str) -> httpx.Client:
        """An HTTP client with the key of `key` (a tenant or `admin`); None: without one."""
        if key is not None:
            headers["authorization"] = f"Bearer {self.keys[key]}"
        return self.stack.enter_context(plain_client(self.url, headers))

    def node(
        self,
        script: Script = echo,
        node_id: str | None = None,
        publish: bool = True,
        answers: bool = True,
        **record: Any,
    ) -> StubNode:
        """A new stub node. `answers`: whether it answers the gateway's question for its record."""
        node = StubNode(
            node_id or f"node-{self.nodes_before + len(self.nodes)}",
            self.base.fingerprint,
            self.secret,
            self.base.max_context,
            script,
            answers=answers,
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
    base = find_base(model, "stories260K", LocalStore(folder / "registry"))
    running = Running(config, base, secret, keys, stack)
    running.url = stack.enter_context(served(create_app(config)))
    return running


_tenants = count()


@contextmanager
def as_new(shared: Running, *, with_node: bool = True) -> Iterator[Running]:
    """Yields a gateway that other tests have used, almost as a new one would be: with tenants of its own, which have
    nothing yet, and with its first node as it was made, or without nodes. Nodes that are added end with the context;
    earlier ones are still listed, as draining."""
    node, tenants = shared.nodes[0], {role: f"{role}-{next(_tenants)}" for role in ("acme", "other")}
    keys = dict(shared.keys)
    with plain_client(shared.url, {"authorization": f"Bearer {keys['admin']}"}) as admin:
        for role, name in tenants.items():
            admin.put(f"/tenants/{name}", json={}).raise_for_status()
            keys[role] = admin.post(f"/tenants/{name}/keys").raise_for_status().json()["key"]
    node.script = echo
    node.received.clear()
    for event in (node.disconnected, node.began, node.go_on):
        event.clear()
    node.publish(shared.url, "ready" if with_node else "draining").raise_for_status()
    with ExitStack() as stack:
        made = replace(shared, keys=keys, tenants=tenants, stack=stack, nodes=[node])
        if not with_node:
            made.nodes, made.nodes_before = [], 1
        yield made
        for each in made.nodes:
            each.go_on.set()
            if each is not node:
                each.publish(shared.url, "draining").raise_for_status()


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
