"""An HTTP server that answers questions about nodes as a gateway does, and drains them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Gateway(ThreadingHTTPServer):
    """`open` counts the requests on each node; each look at a draining node ends one of them, unless it is stuck."""

    allow_reuse_port = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.open: dict[str, int] = {}
        self.drained: list[str] = []
        self.orders: list[str] = []
        self.stuck: set[str] = set()
        self.faults: dict[str, str] = {}
        """What is wrong with nodes' GPUs."""
        self.failing: dict[str, tuple[int, str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def items(self) -> list[dict[str, Any]]:
        items = []
        for node, count in self.open.items():
            record: dict[str, Any] = {"id": node, "state": "ready", "running": count, "queued": 0}
            if node in self.faults:
                record |= {"state": "draining", "gpu": {"uuid": "GPU-1", "fault": self.faults[node]}}
            items.append({"record": record, "reserved": 0, "age": 0.1, "circuit": "closed"})
            if node in self.drained and node not in self.stuck:
                self.open[node] = max(0, count - 1)
        return items


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._answer(200, {"nodes": self.server.items()})

    def do_POST(self) -> None:
        node = self.path.split("/")[2]
        if node in self.server.failing:
            status, kind = self.server.failing[node]
            self._answer(status, {"error": {"type": kind, "message": "no", "param": None, "request_id": "r"}})
            return
        self.server.orders.append(f"{self.path.split('/')[3]} {node}")
        if self.path.endswith("/drain"):
            self.server.drained.append(node)
        else:
            self.server.drained.remove(node)
        (item,) = [item for item in self.server.items() if item["record"]["id"] == node]
        self._answer(200, item)

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running_gateway(port: int = 0) -> Iterator[Gateway]:
    """At this port, which may be held by another socket that does not listen (SO_REUSEPORT); 0: at a free one."""
    with Gateway(port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
