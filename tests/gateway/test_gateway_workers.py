"""Two real gateway workers that share a real Redis: what one knows the other knows, and what happens when parts die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import httpx_sse
import msgspec
import pytest
from stub_node import StubNode, echo, hang_after_first, stub_node
from test_gateway_restart import listens, publishing
from test_gateway_server import PROGRAM, config, node_of, process, wait_for  # noqa: F401  (config is a fixture)

from adapters.local_store import LocalStore
from adapters.slo import Slo
from adapters.tenants import Limits, Tenants
from gateway.config import GatewayConfig
from tests.support.redis_server import RedisServer, redis_server

CALL = {"prompt": "x", "max_tokens": 2}
PATH = "/invoke/stories260K"


@dataclass
class Pair:
    config: GatewayConfig
    url: str
    child: subprocess.Popen[bytes]
    redis: RedisServer
    node: StubNode

    @property
    def workers(self) -> list[int]:
        pid = self.child.pid
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    @contextmanager
    def client(self, worker: int) -> Iterator[httpx.Client]:
        """Whose connection belongs to this worker: the other can't take it, for it is held while it is made."""
        others = [pid for pid in self.workers if pid != worker]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        with httpx.Client(base_url=self.url, timeout=60, verify=False) as client:
            try:
                client.get("/healthz").raise_for_status()
            finally:
                for pid in others:
                    os.kill(pid, signal.SIGCONT)
            yield client

    def publish(self, *clients: httpx.Client, **told: object) -> None:
        assert self.node.publish(self.url, **told).status_code == 204
        self.wait_until_known(*clients)

    def wait_until_known(self, *clients: httpx.Client) -> None:
        """The workers of these clients have been told of the node, by Redis."""
        self.until(lambda: self.node.seq > 0)
        for client in clients:
            self.until(lambda client=client: bool(client.get("/nodes").json()["nodes"]))  # type: ignore[misc]

    def until(self, condition: Callable[[], bool]) -> None:
        """A test's own time limit bounds it."""
        while not condition():
            assert self.child.poll() is None
            time.sleep(0.01)


@pytest.fixture
def pair(config: GatewayConfig, tmp_path: Path) -> Iterator[Pair]:  # noqa: F811
    with ExitStack() as stack:
        (tmp_path / "redis").mkdir()
        redis = stack.enter_context(redis_server(tmp_path / "redis", password="hush-hush"))
        changed = msgspec.structs.replace(config, workers=2, redis=redis.url, shutdown_seconds=60.0, cache_seconds=60.0)
        url = f"http://127.0.0.1:{config.port}"
        child = stack.enter_context(process(changed, tmp_path / "log"))
        node = stack.enter_context(stub_node(node_of(config, echo)))
        wait_for(url, "/healthz", child)
        found = Pair(changed, url, child, redis, node)
        found.until(lambda: len(found.workers) == 2)
        yield found
        assert "hush" not in (tmp_path / "log").read_text()


@contextmanager
def stream(client: httpx.Client, path: str = PATH) -> Iterator[Iterator[httpx_sse.ServerSentEvent]]:
    """Whose first token has come."""
    with httpx_sse.connect_sse(client, "POST", path, json={"prompt": "x", "stream": True}) as source:
        assert source.response.status_code == 200, source.response.read()
        events = source.iter_sse()
        assert next(events).event == "token"
        yield events


def served(client: httpx.Client) -> bool:
    return client.post(PATH, json=CALL).status_code == 200


def test_what_one_worker_is_told_the_other_knows(pair: Pair, pirate: dict[str, Any]) -> None:
    Tenants(LocalStore(Path(pair.config.registry))).put("default", slo=Slo(ttft_ms=60_000.0))
    with ExitStack() as stack:
        one, two = [stack.enter_context(pair.client(worker)) for worker in pair.workers]
        pair.publish(one, two)
        assert served(one) and served(two)
        assert [node["record"]["seq"] for node in two.get("/nodes").json()["nodes"]] == [1]

        # How a call was routed, whoever is asked.
        call = two.post(PATH, json=CALL).json()["id"]
        assert one.get(f"/explain/{call}").json() == two.get(f"/explain/{call}").json()
        assert one.get("/explain/inv_none").status_code == 404

        # What was kept of the tenant's promises.
        pair.until(lambda: [_attained(client) for client in (one, two)] == [(3, 1.0)] * 2)

        # Functions: a change is seen at once, though each would answer from its memory for a minute.
        assert one.post("/deploy/f", files=pirate).status_code == 201
        assert two.post("/invoke/f", json=CALL).status_code == 200
        pair.until(lambda: one.get("/functions/f").json()["last_hour"]["invocations"] == 1)
        assert one.delete("/functions/f").status_code == 204
        pair.until(lambda: two.post("/invoke/f", json=CALL).status_code == 404)

        # A forced delete ends what runs elsewhere.
        pair.node.script = hang_after_first
        assert one.post("/deploy/g", files=pirate).status_code == 201
        with stream(two, "/invoke/g") as events:
            assert one.delete("/functions/g?force=true").status_code == 204
            assert next(events).json()["error"]["type"] == "cancelled"


def _attained(client: httpx.Client) -> tuple[int, float | None]:
    window = client.get("/tenants/default").json()["attainment"][-1]
    return window["calls"], window["all"]


def test_what_a_killed_worker_counted_stays_but_for_its_last_second(pair: Pair, pirate: dict[str, Any]) -> None:
    first, second = pair.workers

    def called(client: httpx.Client) -> int:
        return int(client.get("/functions/f").json()["last_hour"]["invocations"])

    with ExitStack() as stack, publishing(pair.node, pair.url):
        one, two = [stack.enter_context(pair.client(worker)) for worker in (first, second)]
        pair.wait_until_known(one, two)
        assert one.post("/deploy/f", files=pirate).status_code == 201
        assert one.post("/invoke/f", json=CALL).status_code == 200
        assert called(one) == 1, "at once where it was counted"
        assert two.post("/invoke/f", json=CALL).status_code == 200
        pair.until(lambda: called(two) == 2)
        os.kill(first, signal.SIGKILL)
        pair.until(lambda: len(pair.workers) == 2 and first not in pair.workers)
        fresh = stack.enter_context(pair.client(next(pid for pid in pair.workers if pid != second)))
        assert (called(two), called(fresh)) == (2, 2)


def test_an_autoscaler_sees_the_load_of_both_workers(pair: Pair) -> None:
    pair.node.script = hang_after_first
    with ExitStack() as stack:
        one, two = [stack.enter_context(pair.client(worker)) for worker in pair.workers]
        pair.publish(one, two, pool="here")

        def sees(opened: int) -> bool:
            told = [client.get("/pools").json() for client in (one, two)]
            counts = [sum(pool["open_requests"] for pool in seen["pools"]) for seen in told]
            return counts == [opened, opened] and [seen["workers"] for seen in told] == [2, 2]

        with stream(one), stream(two):
            pair.until(lambda: sees(2))
            pair.node.go_on.set()
        pair.until(lambda: sees(0))

        body = {"seconds": 60.0}
        assert one.put("/pools/autoscaler", json={**body, "holder": "a"}).json()["holder"] == "a"
        assert two.put("/pools/autoscaler", json={**body, "holder": "b"}).json()["holder"] == "a"
        assert two.put("/pools/autoscaler", json={"seconds": 0, "holder": "a"}).json()["holder"] is None
        pair.redis.kill()
        pair.until(lambda: two.get("/pools").json()["stale"] is not None)
        refused = two.put("/pools/autoscaler", json={**body, "holder": "b"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable")


def test_a_limit_holds_for_both_workers_until_one_dies(pair: Pair) -> None:
    Tenants(LocalStore(Path(pair.config.registry))).put("default", limits=Limits(concurrent=1))
    pair.node.script = hang_after_first
    first, second = pair.workers
    with ExitStack() as stack, publishing(pair.node, pair.url):
        one, two = [stack.enter_context(pair.client(worker)) for worker in (first, second)]
        pair.wait_until_known(one, two)
        with stream(one):
            refused = two.post(PATH, json=CALL)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limited")
            os.kill(first, signal.SIGKILL)
            pair.node.go_on.set()
            pair.until(lambda: served(two))  # once the dead worker has been silent for long enough
        pair.until(lambda: len(pair.workers) == 2 and first not in pair.workers)


def test_a_place_that_turns_out_to_be_taken(pair: Pair) -> None:
    """Also on the only node: nothing is sent to it before Redis has said yes."""
    with ExitStack() as stack:
        clients = [stack.enter_context(pair.client(worker)) for worker in pair.workers]
        pair.publish(*clients)
        assert all(map(served, clients))
        (key,) = pair.redis.client.scan_iter("*:node:*")
        pair.redis.client.hset(key, "limit", 0)  # as if others had taken all its places: nobody was told
        asked = len(pair.node.received)
        for client, body in product(clients, (CALL, {**CALL, "stream": True})):
            reply = client.post(PATH, json=body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (429, "overloaded")
            assert "retry-after" in reply.headers
        assert len(pair.node.received) == asked
        assert pair.node.publish(pair.url).status_code == 204
        assert all(map(served, clients))
        assert pair.node.publish(pair.url).status_code == 204
        pair.until(lambda: [node["reserved"] for node in clients[0].get("/nodes").json()["nodes"]] == [0])


def test_redis_goes_and_comes_back(pair: Pair, tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, two = [stack.enter_context(pair.client(worker)) for worker in pair.workers]
        pair.publish(one, two)
        assert served(one) and served(two)
        pair.redis.kill()
        assert served(one) and served(two)
        for client in (one, two):
            pair.until(partial(_is_stale, client))
            assert client.get("/readyz").status_code == 200
            assert _stale(client) >= 0
        command = [sys.executable, "-c", PROGRAM]
        again = subprocess.run(command, input=msgspec.json.encode(pair.config), capture_output=True, timeout=60)
        assert again.returncode != 0
        assert f"Redis at redis://127.0.0.1:{pair.redis.port}/0 does not answer" in again.stderr.decode()
        assert "hush" not in again.stderr.decode()
        pair.redis.start()
        pair.until(lambda: not _is_stale(one) and not _is_stale(two))
        assert served(one) and served(two)


def _is_stale(client: httpx.Client) -> bool:
    check = client.get("/readyz").json()["checks"]["cluster"]
    assert check["ok"], "it serves"
    return "away" in (check["problem"] or "")


def _stale(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("garnish_cluster_stale_seconds ")))


def test_a_reload_of_two_workers_breaks_nothing_off(pair: Pair) -> None:
    pair.node.script = hang_after_first
    before = pair.workers
    with ExitStack() as stack, publishing(pair.node, pair.url):
        clients = [stack.enter_context(pair.client(worker)) for worker in before]
        pair.wait_until_known(*clients)
        streams = [stack.enter_context(stream(client)) for client in clients]
        pair.child.send_signal(signal.SIGHUP)
        pair.until(lambda: len(set(pair.workers) - set(before)) == 2)
        with pair.client(min(set(pair.workers) - set(before))) as fresh, stream(fresh) as events:
            pair.node.go_on.set()
            for opened in (*streams, events):
                assert [event.event for event in opened] == ["token", "done"]
        stack.close()
        pair.until(lambda: not set(before) & set(pair.workers))
    pair.child.send_signal(signal.SIGTERM)
    assert pair.child.wait(60) == 0
    assert not listens(pair.config.port)
