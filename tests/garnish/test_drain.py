"""Draining nodes that are about to go, against an HTTP server that answers as a gateway does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from garnish.client import Client
from garnish.connection import Connection
from garnish.drain import drain
from garnish.errors import GarnishError


class Gateway(ThreadingHTTPServer):
    """`open` counts the requests on each node; each look at a draining node ends one of them, unless it is stuck."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.open: dict[str, int] = {}
        self.drained: list[str] = []
        self.stuck: set[str] = set()
        self.failing: dict[str, tuple[int, str]] = {}

    def items(self) -> list[dict[str, Any]]:
        items = []
        for node, count in self.open.items():
            record = {"id": node, "running": count, "queued": 0}
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
        self.server.drained.append(node)
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


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with Client(connection=Connection(f"http://127.0.0.1:{gateway.server_port}", "gak_x")) as made:
        yield made


def ignore(_line: str) -> None:
    pass


def test_it_waits_until_nothing_is_open(gateway: Gateway, client: Client) -> None:
    gateway.open = {"here-1": 5, "here-2": 6, "other": 7}
    told: list[str] = []
    assert drain(client, ["here-1", "here-2"], 60.0, told.append) == []
    assert gateway.drained == ["here-1", "here-2"]
    assert gateway.open == {"here-1": 0, "here-2": 0, "other": 7}
    assert told[0] == "draining: requests are open on here-1, here-2"


def test_nodes_that_the_gateway_does_not_know_are_left_out(gateway: Gateway, client: Client) -> None:
    gateway.open = {"here-1": 0}
    assert drain(client, ["here-1", "here-9"], 60.0, ignore) == []
    assert gateway.drained == ["here-1"]


@pytest.mark.parametrize("failure", [(404, "not_found"), (502, "node_failed")])
def test_a_node_that_has_died_meanwhile_needs_no_drain(
    gateway: Gateway, client: Client, failure: tuple[int, str]
) -> None:
    gateway.open, gateway.failing = {"here-1": 1, "here-2": 0}, {"here-1": failure}
    assert drain(client, ["here-1", "here-2"], 60.0, ignore) == []
    assert gateway.drained == ["here-2"]


def test_the_wait_is_bounded(gateway: Gateway, client: Client) -> None:
    gateway.open, gateway.stuck = {"here-1": 1, "here-2": 0}, {"here-1"}
    assert drain(client, ["here-1", "here-2"], 0.0, ignore) == ["here-1"]


def test_a_refusal_is_told(gateway: Gateway, client: Client) -> None:
    gateway.open, gateway.failing = {"here-1": 1}, {"here-1": (403, "forbidden")}
    with pytest.raises(GarnishError, match="forbidden"):
        drain(client, ["here-1"], 60.0, ignore)


def test_a_gateway_that_is_away_is_told(gateway: Gateway) -> None:
    with (
        Client(connection=Connection("http://127.0.0.1:9", "")) as client,
        pytest.raises(GarnishError, match="unreachable"),
    ):
        drain(client, ["here-1"], 60.0, ignore)
