"""A streaming server of /v1/completions on a real port that behaves as the model's name says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from aiohttp import web


class ScriptedServer:
    """`ok` and anything else without a meaning of its own: all tokens; see `_answer` for the others.

    With `together`, no request is answered before that many have arrived, so a client that holds some back gets none.
    """

    def __init__(self, together: int = 1) -> None:
        self.url = ""
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.elsewhere = 0
        self._barrier = asyncio.Barrier(together)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._barrier.wait()
            return await self._answer(request, body)
        finally:
            self.at_once -= 1

    async def land(self, request: web.Request) -> web.Response:
        """Where `elsewhere` redirects to."""
        self.elsewhere += 1
        return web.Response(status=200)

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        model, count = body["model"], int(str(body["max_tokens"]))
        if model in ("404", "429", "500"):
            return web.json_response({"error": {"type": "overloaded", "message": "no"}}, status=int(str(model)))
        if model == "elsewhere":
            raise web.HTTPTemporaryRedirect("/elsewhere")
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        if model == "silent":
            await asyncio.sleep(3600)
        for i in range(count):
            if model in ("broken", "refused in stream", "garbage", "cut off") and i == 2:
                return await self._fail(request, reply, str(model))
            # The first token has no text: half a character, say.
            await reply.write(_event({"choices": [{"index": 0, "text": "a" if i else "", "finish_reason": None}]}))
        await reply.write(b": a comment\n\n")
        await reply.write(_event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": None}))
        if model != "no usage":
            await reply.write(_event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}}))
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _fail(self, request: web.Request, reply: web.StreamResponse, how: str) -> web.StreamResponse:
        if how == "broken":
            assert request.transport is not None
            request.transport.abort()
        elif how == "refused in stream":
            await reply.write(_event({"error": {"type": "node_failed", "message": "gone", "code": None}}))
        elif how == "garbage":
            await reply.write(b"data: {not json\n\n")
        return reply  # `cut off`: a proper end of the body, in the middle of the events


def _event(data: object) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@contextlib.asynccontextmanager
async def scripted_server(together: int = 1) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(together)
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_route("*", "/elsewhere", server.land)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()
