"""A gateway that has few file descriptors serves callers with a key, whatever others hold open."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import httpx
import httpx_sse
import msgspec
import pytest
from running_gateway import until
from stub_node import echo, hang_after_first, stub_node
from test_gateway_server import PROGRAM, config, node_of, process, wait_for, worker_of

from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from gateway.config import GatewayConfig
from tests.support.idle_connections import LIMITED, closed, descriptor_limit, idle_connections

__all__ = ["config"]

LIMIT = 400
FEW = LIMITED.format(soft=LIMIT, hard=LIMIT) + PROGRAM


@pytest.fixture
def keyed(config: GatewayConfig) -> tuple[GatewayConfig, dict[str, str]]:
    """Settings of a gateway that wants keys, and the headers of a tenant's call."""
    tenants = Tenants(LocalStore(Path(config.registry)))
    tenants.put("acme")
    key = tenants.add_key("acme")[0]
    return msgspec.structs.replace(config, auth="keys"), {"authorization": f"Bearer {key}"}


def test_connections_without_a_key_keep_nobody_out(keyed: tuple[GatewayConfig, dict[str, str]], tmp_path: Path) -> None:
    settings, headers = keyed
    url, call = f"http://127.0.0.1:{settings.port}", {"prompt": "x"}
    with process(settings, tmp_path / "log", FEW) as child, stub_node(node_of(settings, hang_after_first)) as node:
        wait_for(url, "/healthz", child)
        assert node.publish(url).status_code == 204
        with (
            httpx.Client(base_url=url, headers=headers, timeout=60, verify=False) as client,
            httpx_sse.connect_sse(client, "POST", "/invoke/stories260K", json=call | {"stream": True}) as source,
        ):
            events = source.iter_sse()
            assert next(events).event == "token"
            node.script = echo
            with idle_connections(settings.port, 1500) as idle:
                for _ in range(50):
                    with httpx.Client(base_url=url, headers=headers, timeout=60, verify=False) as newcomer:
                        assert newcomer.post("/invoke/stories260K", json=call).status_code == 200
                until(lambda: closed(idle) > 1500 - LIMIT)
            node.go_on.set()
            assert [event.event for event in events][-1] == "done"
        assert client.is_closed
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    told = [line for line in lines if line["logger"] == "cluster.descriptors"]
    assert (told[0]["level"], told[0]["limit"]) == ("warning", LIMIT)
    assert "LimitNOFILE" in told[0]["message"]
    assert told[-1]["limit"] == LIMIT
    assert told[-1]["closed"] > 0


def test_calls_beyond_the_descriptors_are_told_to_come_again(
    keyed: tuple[GatewayConfig, dict[str, str]], tmp_path: Path
) -> None:
    """Each call takes two: its own connection, and one to the node. Calls that are running are not ended for others."""
    settings, headers = keyed
    url = f"http://127.0.0.1:{settings.port}"
    head = f"POST /invoke/stories260K HTTP/1.1\r\nhost: x\r\nauthorization: {headers['authorization']}\r\n"
    body = b'{"prompt": "x", "stream": true}'
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    with process(settings, tmp_path / "log", FEW) as child, stub_node(node_of(settings, hang_after_first)) as node:
        wait_for(url, "/healthz", child)
        assert node.publish(url, queue_limit=1000).status_code == 204
        with ExitStack() as callers:
            begins = []
            for _ in range(300):
                with idle_connections(settings.port, 1) as [caller]:
                    caller.sendall(request)
                    begins.append(caller.recv(65536))
                    callers.enter_context(caller.dup())  # the connection stays open
            served = [begin for begin in begins if begin.startswith(b"HTTP/1.1 200")]
            refused = begins[len(served) :]
            assert served == begins[: len(served)]
            assert len(served) > 100
            assert refused
            for begin in refused:
                assert begin.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1\r\n" in begin
                assert b"unavailable" in begin
            node.go_on.set()
        assert wait_for(url, "/healthz", child).status_code == 200


def test_the_soft_limit_is_raised(config: GatewayConfig, tmp_path: Path) -> None:
    program = LIMITED.format(soft=LIMIT, hard=10_000) + PROGRAM
    with process(config, tmp_path / "log", program) as child:
        wait_for(f"http://127.0.0.1:{config.port}", "/healthz", child)
        assert descriptor_limit(child.pid) == descriptor_limit(worker_of(child.pid)) == 10_000
    assert "descriptors" not in (tmp_path / "log").read_text()
