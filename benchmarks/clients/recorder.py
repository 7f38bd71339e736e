"""A proxy between a client and a service that writes down each request without its key.

    python -m benchmarks.clients.recorder TARGET FILE

Prints its URL, and runs until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

MAX_BODY = 16 << 20
OF_ONE_CONNECTION = {"connection", "content-length", "host", "transfer-encoding"}


class Recorder:
    def __init__(self, target: str, file: Path, session: aiohttp.ClientSession) -> None:
        self._target = target
        self._file = file
        self._session = session

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """The service's answer, piece by piece as it comes."""
        body = await request.read()
        line = {
            "method": request.method,
            "path": request.path_qs,
            "key": "authorization" in request.headers,
            "body": json.loads(body) if body else None,
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        sent = {name: value for name, value in request.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        url = self._target + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=sent) as answer:
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in OF_ONE_CONNECTION}
            reply = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
            await reply.prepare(request)
            async for piece in answer.content.iter_any():
                await reply.write(piece)
            return reply


async def main(target: str, file: Path) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", Recorder(target, file, session).pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print("http://{}:{}".format(*runner.addresses[0]), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
