"""A stub node that does what it is told of its adapters, and tells the gateway at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import httpx
import msgspec
from running_gateway import Running
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from stub_node import StubNode, echo, stub_node

from cluster.news import Resident
from cluster.residency import Moved, PrefetchOrder, WantedResidency
from cluster.secret import is_authorized


@dataclass
class WantingNode(StubNode):
    gateway: str = ""
    loads: bool = True
    """Whether a prefetch ends; else the node answers that it goes on."""
    refusal: tuple[int, str] | None = None
    """Status and error type of its answer to prefetches."""
    ordered: list[str] = field(default_factory=list)
    wanted: list[tuple[float, WantedResidency]] = field(default_factory=list)
    """With the monotonic time at which each came."""
    held: dict[str, str] = field(default_factory=dict)
    """Tier by digest."""

    def app(self) -> Starlette:
        app = super().app()
        app.router.routes.append(Route("/adapters/wanted", self.want, methods=["POST"]))
        return app

    async def prefetch(self, request: Request) -> Response:
        if not is_authorized(request.headers.get("authorization"), self.secret):
            return Response(status_code=401)
        digest = msgspec.msgpack.decode(await request.body(), type=PrefetchOrder).adapter.digest
        self.ordered.append(digest)
        if self.refusal is not None:
            return JSONResponse({"error": {"type": self.refusal[1], "message": "not here"}}, self.refusal[0])
        if not self.loads:
            return Response(msgspec.msgpack.encode(Moved(digest, None)), 202)
        await run_in_threadpool(self.hold, digest, "device")
        return Response(msgspec.msgpack.encode(Moved(digest, "device")))

    async def want(self, request: Request) -> Response:
        if not is_authorized(request.headers.get("authorization"), self.secret):
            return Response(status_code=401)
        self.wanted.append((monotonic(), msgspec.msgpack.decode(await request.body(), type=WantedResidency)))
        return Response(status_code=204)

    def hold(self, digest: str, tier: str) -> httpx.Response:
        self.held[digest] = tier
        return self.tell()

    def tell(self, **changed: object) -> httpx.Response:
        residents = [Resident(digest, tier, 1000, 0) for digest, tier in self.held.items()]
        return self.publish(self.gateway, residents=residents, **changed)


def wanting_node(running: Running, node_id: str, **fields: object) -> WantingNode:
    record = {name: fields.pop(name) for name in ("adapter_bytes", "host_bytes") if name in fields}
    base = running.base
    node = WantingNode(node_id, base.fingerprint, running.secret, base.max_context, echo, gateway=running.url, **fields)
    running.stack.enter_context(stub_node(node))
    assert node.tell(**record).status_code == 204
    return node
