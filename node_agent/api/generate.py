"""POST /generate: takes one request and streams frames. It is a plain ASGI endpoint, since it must notice when its
caller disconnects."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import ServiceError
from cluster.messages import Event, Failed, GenerateRequest, encode_event
from node_agent.api.detokenize import TokenText
from node_agent.api.reply import RETRYABLE, Reply
from node_agent.api.request import decode_request, read_body
from node_agent.api.requests import Ended, InFlight, RequestRegistry

SLACK = 10.0
"""Seconds after the registry's own limit at which a caller that reads nothing is disconnected."""
RESUMED_AT_ONCE = 64
"""Tokens detokenised at once; they take some milliseconds."""


class Generate:
    """Endpoint for generation. Once the body is a valid request, the reply is 200 with a stream of frames; later errors
    are Failed frames."""

    def __init__(self, registry: RequestRegistry, tokens: TokenText, node_id: str) -> None:
        self._registry = registry
        self._tokens = tokens
        self._node_id = node_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = time.monotonic()
        body = await read_body(Request(scope, receive), self._registry.limits.body_bytes)
        writer = FrameWriter(send)
        try:
            request = decode_request(body)
            entry = self._registry.submit(request)
        except ServiceError as error:
            if error.type == "invalid_request":
                raise
            await writer.start()
            await writer.write([_failed(error)], last=True)
            return
        try:
            reply = Reply(request, self._node_id, self._tokens, received)
            await self._resume(reply, request.generated)
            if reply.stopped:  # the previous node failed before it could report the stop
                self._registry.cancel(entry)
            await self._serve(request, reply, entry, receive, writer)
        finally:
            self._registry.cancel(entry)

    async def _resume(self, reply: Reply, generated: list[int]) -> None:
        """Processes the tokens that another node generated, in parts, so that other streams are not delayed by a long
        text."""
        for begin in range(0, len(generated), RESUMED_AT_ONCE):
            reply.resume(generated[begin : begin + RESUMED_AT_ONCE])
            await asyncio.sleep(0)

    async def _serve(
        self, request: GenerateRequest, reply: Reply, entry: InFlight, receive: Receive, writer: FrameWriter
    ) -> None:
        """Streams until the end, or until the caller disconnects."""
        streaming = asyncio.create_task(self._stream(reply, entry, writer))
        leaving = asyncio.create_task(_caller_left(receive))
        try:
            done, _ = await asyncio.wait(
                {streaming, leaving},
                timeout=request.timeout + self._registry.backstop + SLACK,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if streaming in done:
                streaming.result()
        finally:
            streaming.cancel()
            leaving.cancel()
            await asyncio.wait({streaming, leaving})

    async def _stream(self, reply: Reply, entry: InFlight, writer: FrameWriter) -> None:
        await writer.start()  # before queueing, so that the caller learns at once that the node has the request
        while not reply.ended:
            try:
                events = await entry.events()
            except Ended as ended:
                await writer.write([reply.fail(ended.type, ended.message)], last=True)
                return
            out: list[Event] = []
            was_stopped = reply.stopped
            for event in events:
                translated = reply.translate(event)
                if translated is not None:
                    out.append(translated)
            if reply.stopped and not was_stopped:
                self._registry.cancel(entry)
            if out:
                await writer.write(out, last=reply.ended)


class FrameWriter:
    """Writes events as the body of one streamed reply."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def start(self) -> None:
        """Sends the reply's headers."""
        headers = [(b"content-type", b"application/x-garnish-frames"), (b"cache-control", b"no-store")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def write(self, events: list[Event], last: bool) -> None:
        body = b"".join(map(encode_event, events))
        message: Message = {"type": "http.response.body", "body": body, "more_body": not last}
        await self._send(message)


async def _caller_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # the body's last, empty message


def _failed(error: ServiceError) -> Failed:
    return Failed(
        type=error.type,
        message=error.message,
        retryable=error.type in RETRYABLE,
        retry_after=error.retry_after,
    )
