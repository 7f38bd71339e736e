"""A gateway that is killed while it runs events: the next one runs them again, and each ends once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
from stub_node import echo, hang_before_first, stub_node
from test_gateway_server import PROGRAM, config, node_of, process, wait_for, worker_of  # noqa: F401  (a fixture)

from gateway.config import GatewayConfig
from gateway.events.messages import EventReply

EVENTS = 12
HASTY = "from gateway.events import jobs\njobs.LOST_PAUSE_S = 0.5\n"


def test_events_of_a_killed_gateway_are_run_again(config: GatewayConfig, tmp_path: Path) -> None:  # noqa: F811
    url = f"http://127.0.0.1:{config.port}"
    with (
        httpx.Client(base_url=url, timeout=30, verify=False) as client,
        stub_node(node_of(config, hang_before_first)) as node,
    ):
        with process(config, tmp_path / "log") as child:
            wait_for(url, "/healthz", child)
            node.publish(url).raise_for_status()
            ids = [submit(client) for _ in range(EVENTS)]
            wait_until(lambda: len(node.received) >= EVENTS // 2)
            os.kill(worker_of(child.pid), signal.SIGKILL)
            child.kill()
        node.script = echo
        node.go_on.set()
        a_minute_passes(Path(config.registry))
        with process(config, tmp_path / "log2", HASTY + PROGRAM) as child:
            wait_for(url, "/healthz", child)
            node.publish(url).raise_for_status()
            wait_until(lambda: all(event(client, event_id).ended for event_id in ids))
            found = [event(client, event_id) for event_id in ids]
    assert [each.state for each in found] == ["succeeded"] * EVENTS
    again = [each for each in found if len(each.attempts) == 2]
    assert again
    assert all(each.attempts[0].error.type == "node_failed" for each in again if each.attempts[0].error)
    assert max(len(each.attempts) for each in found) == 2


def submit(client: httpx.Client) -> str:
    reply = client.post("/invoke/stories260K", json={"prompt": "x", "max_tokens": 2, "background": True})
    assert reply.status_code == 202, reply.text
    found: dict[str, Any] = reply.json()
    return str(found["id"])


def event(client: httpx.Client, event_id: str) -> EventReply:
    return msgspec.json.decode(client.get(f"/invocations/{event_id}").content, type=EventReply)


def a_minute_passes(registry: Path) -> None:
    """For the store: who wrote a marker or a lease has been silent since."""
    past = time.time() - 120
    for path in (registry / "events").rglob("*"):
        os.utime(path, (past, past))
    (registry / "leases" / "leader.json").unlink(missing_ok=True)


def wait_until(condition: Any) -> None:
    """A test's own time limit bounds it."""
    while not condition():
        time.sleep(0.05)
