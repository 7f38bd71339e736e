"""HTTP by hand, for requests that no client library would send."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any


def send(url: str, head: str, body: bytes = b"", *, until_close: bool = True) -> tuple[int, dict[str, Any]]:
    """Send the bytes on a connection of their own; status and JSON body of the answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        with suppress(BrokenPipeError):  # the server has answered, and reads no more of the body
            raw.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
        answer = b""
        while not _complete(answer):
            chunk = raw.recv(65536)
            if not chunk:
                break
            answer += chunk
    top, _, content = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(content)


def _complete(answer: bytes) -> bool:
    top, end, content = answer.partition(b"\r\n\r\n")
    length = next((line for line in top.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    return bool(end) and len(content) >= int(length.split(b":")[1])
