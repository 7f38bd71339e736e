"""Requests of calls that come over no connection: those of batches, and asynchronous ones."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import Message


def spare_request(request_id: str, path: str = "", body: bytes = b"") -> Request:
    """Makes a request as the server would have, of a client that waits for its reply however long it takes. Its call
    runs in spare capacity."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not pending:
            await asyncio.Event().wait()
        return pending.pop()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "path_params": {"target": path.removeprefix("/invoke/")},
        "state": {"request_id": request_id, "spare_only": True},
    }
    return Request(scope, receive)
