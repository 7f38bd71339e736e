"""Weights, SLOs and classes: set by an administrator, told to nodes with each call, and how far they were kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from running_gateway import Running, until_received
from stub_node import StubNode, done, echo, token

from cluster.messages import Event, Failed, GenerateRequest, Started

CALL = {"prompt": "x", "max_tokens": 2}
SLO = {"ttft_ms": 60_000, "tpot_ms": 60_000, "class": "strict"}


async def unbegun(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """Stays in the node's queue."""
    await node.until(node.go_on)
    yield Started(node=node.node_id, cold_start="none")
    yield token(0, "late")
    yield done(asked, 1)


async def full(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Failed(type="overloaded", message="no place", retry_after=1.0)


def test_nodes_learn_what_was_promised(gateway: Running, pirate: dict) -> None:
    admin, acme, (node,) = gateway.client("admin"), gateway.client("acme"), gateway.nodes
    made = admin.put("/tenants/acme", json={"weight": 3, "slo": SLO | {"ttft_ms": 500.0, "tpot_ms": None}})
    assert (made.status_code, made.json()["weight"], made.json()["slo"]["class"]) == (200, 3.0, "strict")
    for name in ("f", "g"):
        assert acme.post(f"/deploy/{name}", files=pirate).status_code in (200, 201)
    assert acme.post("/invoke/f", json=CALL).status_code == 200
    assert acme.post("/v1/completions", json=CALL | {"model": "g"}).status_code == 200
    assert acme.post(f"/invoke/{gateway.base.id}", json=CALL).status_code == 200
    assert gateway.client("other").post(f"/invoke/{gateway.base.id}", json=CALL).status_code == 200
    first, second, base, other = node.received
    assert (first.weight, first.slo_class, first.tpot) == (3.0, "strict", None)
    assert 0 < first.ttft < 0.5, "less what has passed already"
    assert (other.weight, other.slo_class, other.ttft, other.tpot) == (1.0, "standard", None, None)
    assert (base.function, other.function) == ("", "")
    assert len({first.function, second.function, ""}) == 3
    assert first.function != "f", "names stay in the gateway"


def test_a_function_may_be_of_a_lower_class_but_not_of_a_higher(gateway: Running, pirate: dict) -> None:
    admin, acme, (node,) = gateway.client("admin"), gateway.client("acme"), gateway.nodes
    assert acme.post("/deploy/f", files=pirate, data={"policy": '{"slo_class": "strict"}'}).status_code == 201
    for policy, tenant, effective in [
        ("strict", "standard", "standard"),
        ("best_effort", "standard", "best_effort"),
        ("best_effort", "strict", "best_effort"),
        ("standard", "best_effort", "best_effort"),
        (None, "strict", "strict"),
    ]:
        assert acme.patch("/functions/f", json={"slo_class": policy}).status_code == 200
        admin.put("/tenants/acme", json={"slo": {"class": tenant}})
        assert acme.post("/invoke/f", json=CALL).status_code == 200
        assert node.received[-1].slo_class == effective
    assert acme.get("/functions/f").json()["policy"] == {}


def test_how_far_promises_were_kept(gateway: Running) -> None:
    admin, acme, (node,) = gateway.client("admin"), gateway.client("acme"), gateway.nodes
    assert admin.get("/tenants/acme").json()["attainment"] == []
    assert admin.put("/tenants/acme", json={"slo": SLO}).json()["attainment"][0]["calls"] == 0
    for _ in range(3):
        assert acme.post(f"/invoke/{gateway.base.id}", json=CALL).status_code == 200
    assert acme.post(f"/invoke/{gateway.base.id}", json=CALL | {"max_tokens": 10**6}).status_code == 422
    # Who is strict would be turned away at once.
    admin.put("/tenants/acme", json={"slo": SLO | {"ttft_ms": 0.001, "class": "standard"}})
    assert acme.post(f"/invoke/{gateway.base.id}", json=CALL).status_code == 200
    node.script = full
    assert acme.post(f"/invoke/{gateway.base.id}", json=CALL).status_code == 429
    want = {"calls": 5, "ttft": 0.6, "tpot": 0.8, "all": 0.6}
    assert admin.get("/tenants/acme").json()["attainment"] == [
        {"window_seconds": seconds, **want} for seconds in (60, 600, 3600)
    ]
    text = admin.get("/metrics").text
    for line in (
        'garnish_slo_calls_total{slo="ttft",tenant="acme"} 5.0',
        'garnish_slo_attained_total{slo="ttft",tenant="acme"} 3.0',
        'garnish_slo_attainment{slo="all",tenant="acme",window="60s"} 0.6',
    ):
        assert line in text
    assert "garnish_slo" not in "".join(line for line in text.splitlines() if "other" in line)


def test_a_strict_call_is_sent_to_a_node_whose_queue_is_full_of_its_own_jobs(start: Callable[..., Running]) -> None:
    """Which then decides: it knows the classes of those that wait."""
    gateway = start()
    node = gateway.node(unbegun, queue_limit=2)
    admin, acme, base = gateway.client("admin"), gateway.client("acme"), gateway.base.id
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(acme.post, f"/invoke/{base}", json=CALL) for _ in range(2)]
        until_received(node, 2, waiting)
        assert acme.post(f"/invoke/{base}", json=CALL).status_code == 429
        assert admin.put("/tenants/acme", json={"slo": SLO}).status_code == 200
        waiting.append(pool.submit(acme.post, f"/invoke/{base}", json=CALL))
        until_received(node, 3, waiting)
        node.go_on.set()
        assert [call.result().status_code for call in waiting] == [200] * 3


def test_a_full_node_still_takes_who_has_less_waiting(start: Callable[..., Running]) -> None:
    """Of the others' places a few, so that the node can decide who gives way."""
    gateway = start()
    node = gateway.node(unbegun, queue_limit=2)
    acme, other, base = gateway.client("acme"), gateway.client("other"), gateway.base.id
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(acme.post, f"/invoke/{base}", json=CALL) for _ in range(2)]
        until_received(node, 2, waiting)
        refused = acme.post(f"/invoke/{base}", json=CALL)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "overloaded")
        waiting.append(pool.submit(other.post, f"/invoke/{base}", json=CALL))
        until_received(node, 3, waiting)
        second = other.post(f"/invoke/{base}", json=CALL)
        assert second.status_code == 429, "both have their share"
        node.go_on.set()
        assert [call.result().status_code for call in waiting] == [200] * 3
    node.script = echo
    assert acme.post(f"/invoke/{base}", json=CALL).status_code == 200
