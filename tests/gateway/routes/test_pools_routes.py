"""What an autoscaler asks the gateway: the pools' loads and its lease; and calls that are held for a first node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from running_gateway import Running, until
from stub_node import echo, hang_before_first, refuse

from cluster.performance_model import DecodeModel, ModelKey, PerformanceModel, PrefillModel, Transfer
from gateway.calls import dispatch
from gateway.calls.scale_from_zero import UNLED_S

PATH = "/invoke/stories260K"
CALL = {"prompt": "x", "max_tokens": 2}
MODEL = PerformanceModel(
    key=ModelKey(hardware="cpu", base="", dtype="", kernel="", garnish=""),
    decode=DecodeModel(base=0.4, per_row=0.1, per_context=0.0, per_rank=0.0, rank_term="request_ranks"),
    prefill=PrefillModel(base=1.0, per_token=0.0, per_token2=0.0, per_token_rank=0.0),
    to_device=Transfer(latency=0.0, bandwidth=1e9),
    from_store=Transfer(latency=0.0, bandwidth=1e9),
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that has just begun waits for nodes to report but for a moment, and a refused call tries again soon."""
    monkeypatch.setattr(dispatch, "RECORD_EXPIRY", 0.05)
    monkeypatch.setattr(dispatch, "RETRY_PAUSE_S", 0.1)


def loads(admin: httpx.Client) -> tuple[dict[str | None, dict[str, Any]], dict[str, Any]]:
    reply = admin.get("/pools").raise_for_status().json()
    return {pool["pool"]: pool for pool in reply["pools"]}, reply["unplaced"]


def lead(admin: httpx.Client, seconds: float = 60.0, holder: str = "me") -> httpx.Response:
    return admin.put("/pools/autoscaler", json={"holder": holder, "seconds": seconds})


class Caller:
    """Calls in threads."""

    def __init__(self, running: Running) -> None:
        self._client = running.client()
        self._pool = running.stack.enter_context(ThreadPoolExecutor(16))

    def call(self, **fields: Any) -> Future[httpx.Response]:
        return self._pool.submit(lambda: self._client.post(PATH, json=CALL | fields))


def test_open_requests_and_what_they_take_up(start: Callable[..., Running]) -> None:
    running = start()
    admin, caller = running.client("admin"), Caller(running)
    measured = running.node(hang_before_first, "here-1", pool="here", max_rows=4, performance=MODEL)
    running.node(hang_before_first, "own", state="draining", pool="")
    pools, unplaced = loads(admin)
    assert {name: (pool["nodes"], pool["ready"]) for name, pool in pools.items()} == {"here": (1, 1), None: (1, 0)}
    assert (pools["here"]["open_requests"], pools["here"]["demand"], unplaced["open_requests"]) == (0, 0, 0)

    calls = [caller.call() for _ in range(3)]
    until(lambda: len(measured.received) == 3)
    here = loads(admin)[0]["here"]
    # A prefill of 1 s, and half of two tokens expected, each at its share of four rows: 0.4 / 4 + 0.1 s.
    assert here["open_requests"] == 3 and here["demand"] == pytest.approx(3 * 1.2 / 10)
    measured.go_on.set()
    assert [call.result(60).status_code for call in calls] == [200, 200, 200]
    until(lambda: loads(admin)[0]["here"]["open_requests"] == 0)


def test_nodes_that_were_never_measured_count_by_rows(start: Callable[..., Running]) -> None:
    running = start()
    running.node(node_id="here-1", pool="here", max_rows=8, running=4, queued=2)
    running.node(node_id="here-2", pool="here", max_rows=8, running=2)
    assert loads(running.client("admin"))[0]["here"]["demand"] == pytest.approx(1.0)


def test_what_waits_and_what_was_promised(start: Callable[..., Running]) -> None:
    """The node says nothing of having begun, so that all of the wait is the queue's."""
    running = start()
    admin, caller, silent = running.client("admin"), Caller(running), threading.Event()

    async def queue(node: Any, asked: Any) -> Any:
        await node.until(silent)
        async for event in hang_before_first(node, asked):
            yield event

    slo = {"slo": {"ttft_ms": 1.0}}
    admin.put("/tenants/acme", json=slo).raise_for_status()
    node = running.node(queue, "here-1", pool="here", max_rows=4, performance=MODEL)
    calls = [caller.call(), caller.call()]
    until(lambda: len(node.received) == 2 and loads(admin)[0]["here"]["queue_wait"] > 0.2)
    here = loads(admin)[0]["here"]
    assert here["backlog"] == pytest.approx(2 * 1.2) and here["attainment"] is None
    silent.set()
    until(lambda: loads(admin)[0]["here"]["queue_wait"] == 0)
    assert loads(admin)[0]["here"]["backlog"] == 0
    node.go_on.set()
    assert [call.result(60).status_code for call in calls] == [200, 200]
    until(lambda: loads(admin)[0]["here"]["attainment"] is not None)
    assert loads(admin)[0]["here"]["attainment"] == 0.0, "a millisecond is not enough"


def test_refused_requests_count_as_unplaced(start: Callable[..., Running]) -> None:
    running = start()
    running.node(node_id="here-1", pool="here", max_rows=4, performance=MODEL, queued=64)
    refused = running.client().post(PATH, json=CALL)
    assert refused.status_code == 429
    assert loads(running.client("admin"))[1]["demand"] == pytest.approx(1.2 / 10)


def test_one_holds_the_lease(start: Callable[..., Running]) -> None:
    running = start()
    admin = running.client("admin")
    assert admin.get("/pools").json()["autoscaler"] is None
    assert lead(admin).json() == {"holder": "me", "seconds": 60.0}
    assert lead(admin, holder="other").json()["holder"] == "me"
    assert admin.get("/pools").json()["autoscaler"] == "me"
    assert lead(admin, seconds=0, holder="other").json()["holder"] == "me"
    assert lead(admin, seconds=0).json() == {"holder": None, "seconds": 0.0}
    assert lead(admin, holder="other").json()["holder"] == "other"
    assert lead(admin, holder="a b").status_code == 422
    assert lead(admin, seconds=301).status_code == 422
    tenant = running.client()
    assert (tenant.get("/pools").status_code, lead(tenant).status_code) == (403, 403)


def test_without_an_autoscaler_nobody_waits(start: Callable[..., Running]) -> None:
    running = start(hold_seconds=600.0)
    refused = running.client().post(PATH, json=CALL)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert running.client(None).get("/readyz").status_code == 503


def test_with_one_a_call_waits_for_a_first_node(start: Callable[..., Running]) -> None:
    running = start(hold_seconds=600.0)
    admin, caller = running.client("admin"), Caller(running)
    lead(admin).raise_for_status()
    until(lambda: running.client(None).get("/readyz").status_code == 200)
    calls = [caller.call() for _ in range(4)]
    until(lambda: loads(admin)[1]["open_requests"] == 4)
    until(lambda: loads(admin)[1]["queue_wait"] > 0.1)
    node = running.node(node_id="here-1", pool="here", publish=False)
    node.publish(running.url, "warming", pool="here").raise_for_status()
    assert loads(admin)[1]["open_requests"] == 4
    node.publish(running.url, pool="here").raise_for_status()
    for call in calls:
        reply = call.result(60)
        assert reply.status_code == 200 and "hold;dur=" in reply.headers["server-timing"]
    until(lambda: loads(admin)[1]["open_requests"] == 0)
    assert "hold" not in caller.call().result(60).headers["server-timing"]


def test_it_waits_no_longer_than_its_bounds(start: Callable[..., Running]) -> None:
    running = start(hold_seconds=0.3)
    admin, caller = running.client("admin"), Caller(running)
    lead(admin).raise_for_status()
    given_up = caller.call().result(60)
    assert given_up.status_code == 503 and int(given_up.headers["retry-after"]) >= 1
    assert "became ready" in given_up.json()["error"]["message"]
    assert caller.call(timeout=0.1).result(60).json()["error"]["type"] == "timeout"
    until(lambda: loads(admin)[1]["open_requests"] == 0)


def test_who_leaves_is_not_held(start: Callable[..., Running], pirate: dict[str, Any]) -> None:
    running = start(hold_seconds=600.0)
    admin, client = running.client("admin"), running.client()
    lead(admin).raise_for_status()
    with pytest.raises(httpx.ReadTimeout):
        client.post(PATH, json=CALL, timeout=0.3)
    until(lambda: loads(admin)[1]["open_requests"] == 0)

    client.post("/deploy/f", files=pirate).raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(lambda: client.post("/invoke/f", json=CALL))
        until(lambda: loads(admin)[1]["open_requests"] == 1)
        client.delete("/functions/f?force=true").raise_for_status()
        assert held.result(60).json()["error"]["type"] == "cancelled"


def test_a_call_that_meets_the_last_node_as_it_goes_waits_for_the_next(start: Callable[..., Running]) -> None:
    """It was placed before the node was told to drain, and came there after that."""
    running = start(hold_seconds=600.0)
    admin, caller = running.client("admin"), Caller(running)
    going = running.node(refuse, "here-1", pool="here")
    assert caller.call().result(60).status_code == 503, "without an autoscaler no other would come"
    lead(admin).raise_for_status()
    time.sleep(UNLED_S)
    call = caller.call()
    until(lambda: len(going.received) == 2)
    going.publish(running.url, "draining", pool="here").raise_for_status()
    until(lambda: loads(admin)[1]["open_requests"] == 1)
    running.node(node_id="here-2", pool="here")
    reply = call.result(60)
    assert (reply.status_code, reply.headers["x-garnish-node"]) == (200, "here-2")
    assert "hold;dur=" in reply.headers["server-timing"]


def test_a_call_that_is_refused_goes_back_to_a_node_that_need_not_go(start: Callable[..., Running]) -> None:
    running = start(hold_seconds=600.0)
    lead(running.client("admin")).raise_for_status()

    async def refuse_once(node: Any, asked: Any) -> Any:
        async for event in (refuse if len(node.received) == 1 else echo)(node, asked):
            yield event

    running.node(refuse_once, "here-1", pool="here")
    assert Caller(running).call().result(60).status_code == 200
