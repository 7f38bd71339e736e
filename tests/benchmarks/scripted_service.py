"""A service that streams /invoke on a real port: an adapter is on its node once it was called or its load ordered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any, cast

from aiohttp import web

from benchmarks.common.http_service import HttpService

KEY, ADMIN_KEY = "key", "admin"


class ScriptedService:
    """`liar` tells the truth only to callers who ask for log probabilities; `broken` fails within its stream."""

    key, admin_key, pid = KEY, ADMIN_KEY, os.getpid()

    def __init__(self) -> None:
        self.url = ""
        self.here: set[str] = set()
        self.most_orders, self._orders = 0, 0

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {KEY}"
        name, body = request.match_info["name"], await request.json()
        state = "none" if name in self.here else "absent"
        self.here.add(name)
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        lies = name == "liar" and "logprobs" not in body
        for i in range(body["max_tokens"]):
            if name == "broken" and i == 1:
                await _send(reply, {"error": {"type": "node_failed", "message": "gone"}})
                return reply
            await _send(reply, _token(i + 100 * (lies and i == 1), body))
        cold = {"state": state, "exposed_ms": 0.0}
        usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}
        await _send(reply, {"output": {}, "usage": usage, "timing": {"cold_start": cold}})
        return reply

    async def prefetch(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {ADMIN_KEY}"
        assert request.headers["x-garnish-tenant"] == "bench"
        name = (await request.json())["function"]
        self._orders += 1
        self.most_orders = max(self.most_orders, self._orders)
        await asyncio.sleep(0)
        self._orders -= 1
        if name == "refused":
            return web.json_response({}, status=429)
        self.here.add(name)
        return web.json_response({"tier": "device"})

    async def adapters(self, request: web.Request) -> web.Response:
        """All are in host memory, those that are here on the device too; digests are names."""
        assert request.headers["authorization"] == f"Bearer {ADMIN_KEY}"
        tiers = {f"a{i}": "host" for i in range(100)} | dict.fromkeys(self.here, "device")
        found = [{"digest": name, "tier": tier, "layers": None} for name, tier in tiers.items()]
        return web.json_response({"adapters": found})

    async def nodes(self, _: web.Request) -> web.Response:
        record = {"id": "node-1", "prefetch_wasted_bytes": 7}
        return web.json_response({"nodes": [{"record": record}]})


def _token(token: int, body: dict[str, Any]) -> dict[str, Any]:
    event: dict[str, Any] = {"text": f" {token}", "index": 0, "token_id": token}
    if "logprobs" in body:
        event["logprob"] = {"top": [{"logprob": -1.0}, {"logprob": -1.5}]}
    return event


async def _send(reply: web.StreamResponse, data: object) -> None:
    await reply.write(f"event: any\ndata: {json.dumps(data)}\n\n".encode())


@contextlib.asynccontextmanager
async def scripted_service() -> AsyncIterator[tuple[ScriptedService, HttpService]]:
    """The same object twice, as what it is and as what it stands for."""
    service = ScriptedService()
    app = web.Application()
    app.router.add_post("/invoke/{name}", service.invoke)
    app.router.add_post("/nodes/node-1/prefetch", service.prefetch)
    app.router.add_get("/nodes/node-1/adapters", service.adapters)
    app.router.add_get("/nodes", service.nodes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    service.url = f"http://{host}:{port}"
    try:
        yield service, cast(HttpService, service)
    finally:
        await runner.cleanup()
