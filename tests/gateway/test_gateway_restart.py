"""Stops and reloads under load: what runs ends as it should, and nobody is turned away for nothing."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import httpx_sse
import msgspec
import pytest
from running_gateway import until
from stub_node import StubNode, hang_after_first, stub_node
from test_gateway_server import config, node_of, process, wait_for, worker_of  # noqa: F401  (config is a fixture)

from gateway.config import GatewayConfig


@pytest.fixture
def patient(config: GatewayConfig) -> GatewayConfig:  # noqa: F811
    return msgspec.structs.replace(config, shutdown_seconds=60.0)


@contextmanager
def publishing(node: StubNode, url: str) -> Iterator[None]:
    """The node has reported, and goes on to all the time, as real ones do; a gateway that does not listen is tried
    again."""
    node.publish(url).raise_for_status()
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(0.1):
            try:
                node.publish(url)
            except httpx.TransportError:
                continue

    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)


@contextmanager
def open_stream(url: str) -> Iterator[Iterator[httpx_sse.ServerSentEvent]]:
    """A stream whose first token has come."""
    body = {"prompt": "x", "stream": True}
    with (
        httpx.Client(base_url=url, timeout=60, verify=False) as client,
        httpx_sse.connect_sse(client, "POST", "/invoke/stories260K", json=body) as source,
    ):
        events = source.iter_sse()
        assert next(events).event == "token"
        yield events


def test_term_lets_running_streams_end(patient: GatewayConfig, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{patient.port}"
    with process(patient, tmp_path / "log") as child, stub_node(node_of(patient, hang_after_first)) as node:
        wait_for(url, "/healthz", child)
        with publishing(node, url), open_stream(url) as events:
            child.send_signal(signal.SIGTERM)
            until(lambda: child.poll() is not None or not listens(patient.port))
            assert child.poll() is None
            node.go_on.set()
            assert [event.event for event in events] == ["token", "done"]
        assert child.wait(30) == 0


def test_a_reload_turns_nobody_away(patient: GatewayConfig, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{patient.port}"
    with process(patient, tmp_path / "log") as child, stub_node(node_of(patient, hang_after_first)) as node:
        wait_for(url, "/healthz", child)
        before = worker_of(child.pid)
        with publishing(node, url), open_stream(url) as events:
            child.send_signal(signal.SIGHUP)
            answers: list[int] = []
            threads = [threading.Thread(target=lambda: answers.append(_call(url))) for _ in range(4)]
            for thread in threads:
                thread.start()
            # All four have reached the node, through whichever worker.
            until(lambda: child.poll() is not None or len(node.received) == 5)
            node.go_on.set()
            for thread in threads:
                thread.join(60)
            assert [event.event for event in events] == ["token", "done"], "the old worker ends it"
            answers.append(_call(url))
        assert answers == [200] * 5
        until(lambda: child.poll() is not None or not Path(f"/proc/{before}").exists())
        assert child.poll() is None
        assert worker_of(child.pid) != before
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _call(url: str) -> int:
    return httpx.post(f"{url}/invoke/stories260K", json={"prompt": "x"}, timeout=60, verify=False).status_code
