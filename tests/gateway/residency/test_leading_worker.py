"""Two gateway workers over a real Redis: one forecasts for both, and when it is killed the other one goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from stub_node import echo, stub_node
from test_gateway_server import config, node_of, process, wait_for  # noqa: F401  (config is a fixture)
from test_gateway_workers import Pair
from wanting_node import WantingNode

from gateway.config import GatewayConfig
from tests.support.redis_server import redis_server

PROGRAM = """
import sys, msgspec, numpy
from cluster.forecast import forecaster
from cluster.forecast.chances import Forecasts
from gateway.config import GatewayConfig
from gateway.residency import messages
from gateway.server import run

class Called:
    def __init__(self):
        self.calls = {}
    def observe(self, now, counts):
        for key, count in counts.items():
            self.calls[key] = self.calls.get(key, 0) + count
    def forecast(self, now):  # so that the chance within 1 s tells how many calls the leader has heard of
        rows = [(calls / 100, 0.5, 0.5, 0.5) for calls in self.calls.values()]
        return Forecasts(list(self.calls), numpy.array(rows).reshape(-1, 4))
    def error(self):
        return {}

forecaster.Forecaster, messages.WATCH_SECONDS = Called, 0.0
run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig))
"""
CALL = {"prompt": "x", "max_tokens": 1}


@pytest.fixture
def pair(config: GatewayConfig, tmp_path: Path) -> Iterator[Pair]:  # noqa: F811
    with ExitStack() as stack:
        (tmp_path / "redis").mkdir()
        redis = stack.enter_context(redis_server(tmp_path / "redis"))
        changed = msgspec.structs.replace(config, workers=2, redis=redis.url)
        url, plain = f"http://127.0.0.1:{config.port}", node_of(config, echo)
        child = stack.enter_context(process(changed, tmp_path / "log", PROGRAM))
        node = WantingNode("n", plain.base, plain.secret, plain.max_context, echo, gateway=url)
        stack.enter_context(stub_node(node))
        wait_for(url, "/healthz", child)
        found = Pair(changed, url, child, redis, node)
        found.until(lambda: len(found.workers) == 2)
        yield found


def forecast(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/functions/f/forecast").json())


def heard(client: httpx.Client) -> int:
    """Calls that the leader has heard of."""
    return round(100 * ((forecast(client)["chances"] or {}).get("within_1_s", 0.0)))


def test_one_worker_hears_of_all_calls_and_another_one_replaces_it(pair: Pair, pirate: dict[str, Any]) -> None:
    node = pair.node
    assert isinstance(node, WantingNode)
    with ExitStack() as stack:
        one, two = [stack.enter_context(pair.client(worker)) for worker in pair.workers]
        pair.until(lambda: node.tell().status_code == 204)
        pair.wait_until_known(one, two)
        digest = one.post("/deploy/f", files=pirate).json()["digest"]
        pair.until(lambda: all(forecast(client)["watched"] is not None for client in (one, two)))
        for client, calls in ((one, 3), (two, 4)):
            for _ in range(calls):
                assert client.post("/invoke/f", json=CALL).status_code == 200
        pair.until(lambda: [heard(client) for client in (one, two)] == [7, 7])
        pair.until(lambda: bool(node.wanted and node.wanted[-1][1].adapters))
        assert one.post("/functions/f/warm", json={"tier": "host"}).status_code == 202
        pair.until(lambda: node.wanted[-1][1].adapters[0].pinned)

    pair.until(lambda: len(who_leads(pair.url)) == 1)
    (led,) = who_leads(pair.url)
    os.kill(led, signal.SIGKILL)
    killed, told = time.monotonic(), len(node.wanted)
    pair.until(lambda: len(node.wanted) > told)
    at, order = node.wanted[told]
    assert at - killed < 30, "5 s on a host that is not busy"
    assert [(each.adapter.digest, each.pinned) for each in order.adapters] == [(digest, True)], "as it was warmed"


def who_leads(url: str) -> list[int]:
    lines = httpx.get(f"{url}/metrics", timeout=60, verify=False).text.splitlines()
    return [int(line.split("-")[-2]) for line in lines if line.startswith("garnish_leader{") and line.endswith(" 1.0")]
