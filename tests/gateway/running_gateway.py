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
from stub_node import Script, StubNode, echo, stub_node

from adapters.base_model import BaseModel
from gateway.config import GatewayConfig


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
        return self.stack.enter_context(httpx.Client(base_url=self.url, headers=headers, timeout=60))

    def node(self, script: Script = echo, node_id: str | None = None, publish: bool = True, **record: Any) -> StubNode:
        node = StubNode(
            node_id or f"node-{len(self.nodes)}", self.base.fingerprint, self.secret, self.base.max_context, script
        )
        self.stack.enter_context(stub_node(node))
        self.nodes.append(node)
        if publish:
            assert node.publish(self.url, **record).status_code == 204
        return node


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
