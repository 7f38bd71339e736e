"""What operators see of the nodes and tell them: through a real gateway, to nodes that note what they are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import msgspec
import pytest
from command_line import CommandLine
from running_gateway import Running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from stub_node import StubNode, echo, hang_after_first, stub_node

from cluster.gpu import GpuLoad
from cluster.news import full_report
from cluster.residency import AdapterState, AdapterStates, EvictOrder, Moved, PrefetchOrder
from cluster.secret import is_authorized
from garnish.credentials import FILE_NAME, Credentials, write_credentials
from gateway.calls import node_calls
from gateway.routes import nodes

DIGEST = "d" * 64
STATES = AdapterStates(
    [
        AdapterState(DIGEST, "device", 1000, in_use=2, ranks=[8, 16]),
        AdapterState("e" * 64, "absent", 2000, waiting=1, ranks=[8], layers=["device", "enqueued", "host", "no"]),
        AdapterState("f" * 64, "disk", 3000),
    ],
    unnamed=7,
)
CALL = {"prompt": "x", "max_tokens": 2}


@dataclass
class OperatedNode(StubNode):
    """Also answers what operators ask, as `answers` says (status and body by path)."""

    state: str = "ready"
    told: list[tuple[str, bytes]] = field(default_factory=list)
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def app(self) -> Starlette:
        app = super().app()
        paths = ("/record", "/drain", "/undrain", "/adapters", "/adapters/prefetch", "/adapters/evict")
        app.router.routes[:0] = [Route(path, self.operate, methods=["GET", "POST"]) for path in paths]
        return app

    async def operate(self, request: Request) -> Response:
        if not is_authorized(request.headers.get("authorization"), self.secret):
            return JSONResponse({"error": {"type": "unauthenticated", "message": "no"}}, 401)
        path = request.url.path
        self.told.append((path, await request.body()))
        if path in self.answers:
            return Response(self.answers[path][1], self.answers[path][0])
        if path == "/record":
            return Response(msgspec.msgpack.encode(full_report(self.record(self.state))))
        self.state = "draining" if path == "/drain" else "ready"
        return Response(status_code=204)

    def answer(self, path: str, message: msgspec.Struct, status: int = 200) -> None:
        self.answers[path] = status, msgspec.msgpack.encode(message)


def operated(running: Running, node_id: str = "n1", **fields: object) -> OperatedNode:
    node = OperatedNode(
        node_id,
        running.base.fingerprint,
        running.secret,
        running.base.max_context,
        fields.pop("script", echo),  # type: ignore[arg-type]
    )
    running.stack.enter_context(stub_node(node))
    assert node.publish(running.url, **fields).status_code == 204  # type: ignore[arg-type]
    return node


@pytest.fixture
def running(bare: Running) -> Running:
    return bare


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["type"]


def test_a_nodes_adapters_layer_by_layer(running: Running) -> None:
    node = operated(running)
    node.answer("/adapters", STATES)
    reply = running.client("admin").get("/nodes/n1/adapters")
    found = msgspec.json.decode(reply.content, type=nodes.NodeAdapters)
    assert (found.node, found.unnamed, len(found.adapters)) == ("n1", 7, 3)
    loaded, loading, kept = found.adapters
    assert (loaded.tier, loaded.in_use, loaded.ranks, loaded.layers) == ("device", 2, [8, 16], None)
    assert (loading.tier, loading.waiting, loading.layers) == ("absent", 1, ["device", "enqueued", "host", "no"])
    assert (kept.tier, kept.bytes) == ("disk", 3000)


def test_a_function_is_prefetched_by_the_version_that_it_names(
    running: Running, pirate: dict, stories_adapters: dict
) -> None:
    node = operated(running)
    client, admin = running.client(), running.client("admin", **{"x-garnish-tenant": running.tenants["acme"]})
    deployed = client.post("/deploy/f", files=pirate).json()
    node.answer("/adapters/prefetch", Moved(deployed["digest"], "device"))
    for ref in ({"function": "f"}, {"function": "f:1"}, {"function": "f:latest"}, {"digest": deployed["digest"]}):
        node.told.clear()
        reply = admin.post("/nodes/n1/prefetch", json=ref)
        assert reply.status_code == 200
        assert reply.json() == {"node": "n1", "digest": deployed["digest"], "tier": "device"}
        ((path, body),) = node.told
        adapter = msgspec.msgpack.decode(body, type=PrefetchOrder).adapter
        assert (path, adapter.digest) == ("/adapters/prefetch", deployed["digest"])
        assert adapter.artifact == f"artifacts/v1/{running.base.fingerprint}/{deployed['digest']}"
    node.answer("/adapters/prefetch", Moved(deployed["digest"], None), 202)
    reply = admin.post("/nodes/n1/prefetch", json={"function": "f"})
    assert (reply.status_code, reply.json()["tier"]) == (202, None)


def test_the_command_line_means_the_first_tenants_function(
    start: Callable[..., Running], command_line: CommandLine, pirate: dict, tmp_path: Path
) -> None:
    running = start()
    node = operated(running)
    deployed = running.client().post("/deploy/f", files=pirate).json()
    node.answer("/adapters/prefetch", Moved(deployed["digest"], "device"))
    keys = {name: running.keys[name] for name in ("acme", "other")}
    known = Credentials(
        url=running.url, admin_key=running.keys["admin"], tenant="acme", api_key=keys["acme"], keys=keys
    )
    write_credentials(tmp_path / FILE_NAME, known)
    for arguments, code in (([], 0), (["--tenant", "acme"], 0), (["--tenant", "other"], 1)):
        command = ["nodes", "prefetch", "n1", "f", "--state", str(tmp_path), *arguments]
        done = command_line.run(*command, folder=Path.cwd(), environment=os.environ)
        assert done.returncode == code, done.stderr


def test_the_command_line_says_below_the_table_why_a_node_has_its_workers(
    start: Callable[..., Running], command_line: CommandLine, tmp_path: Path
) -> None:
    running = start()
    node, reason = operated(running), "they gain; measured rank 64 on q, k, v, 64 tokens"
    node.publish(running.url, cpu_workers=2, cpu_workers_reason=reason, cpu_workers_ms={"warm": 8.5})
    acme = running.keys["acme"]
    known = Credentials(
        url=running.url, admin_key=running.keys["admin"], tenant="acme", api_key=acme, keys={"acme": acme}
    )
    write_credentials(tmp_path / FILE_NAME, known)
    run = partial(command_line.run, "nodes", "--state", str(tmp_path), folder=Path.cwd(), environment=os.environ)
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"n1: 2 CPU workers: {reason}"]
    whole_record = run("--json")
    record = msgspec.json.decode(whole_record.stdout)["nodes"][0]["record"]
    assert (record["cpu_workers_reason"], record["cpu_workers_ms"]) == (reason, {"warm": 8.5})
    assert not whole_record.stderr


def test_an_adapter_in_use_is_not_evicted(running: Running, pirate: dict) -> None:
    node = operated(running)
    admin = running.client("admin", **{"x-garnish-tenant": running.tenants["acme"]})
    digest = running.client().post("/deploy/f", files=pirate).json()["digest"]
    refusal = {"error": {"type": "conflict", "message": "adapter dddd is in use: 1 requests use it"}}
    node.answers["/adapters/evict"] = 409, msgspec.json.encode(refusal)
    reply = admin.post("/nodes/n1/evict", json={"function": "f"})
    assert error_of(reply) == (409, "conflict")
    assert "1 requests use it" in reply.json()["error"]["message"]
    node.answer("/adapters/evict", Moved(DIGEST, "absent"))
    reply = admin.post("/nodes/n1/evict", json={"digest": DIGEST})  # need not be in the registry any more
    assert reply.json() == {"node": "n1", "digest": DIGEST, "tier": "absent"}
    orders = [msgspec.msgpack.decode(body, type=EvictOrder).digest for _, body in node.told]
    assert orders == [digest, DIGEST]


def test_what_is_not_there_is_404(running: Running, pirate: dict) -> None:
    node = operated(running)
    admin = running.client("admin", **{"x-garnish-tenant": running.tenants["acme"]})
    for method, path in (("GET", "adapters"), ("POST", "drain"), ("POST", "undrain")):
        assert error_of(admin.request(method, f"/nodes/n2/{path}")) == (404, "not_found")
    refs = [{"function": "nobody"}, {"function": "f:9"}, {"function": "f:"}, {"function": "../x"}, {"digest": DIGEST}]
    running.client().post("/deploy/f", files=pirate)
    for ref in refs:
        assert error_of(admin.post("/nodes/n1/prefetch", json=ref)) == (404, "not_found")
    other = running.client("admin", **{"x-garnish-tenant": running.tenants["other"]})
    assert error_of(other.post("/nodes/n1/prefetch", json={"function": "f"})) == (404, "not_found")
    assert error_of(admin.post("/nodes/n2/prefetch", json={"function": "f"})) == (404, "not_found")
    assert node.told == []


@pytest.mark.parametrize(
    ("ref", "param"),
    [
        ({}, "function"),
        ({"function": "f", "digest": DIGEST}, "function"),
        ({"digest": DIGEST.upper()}, "digest"),
        ({"digest": "../../" + "d" * 58}, "digest"),
        ({"digest": DIGEST + "\n"}, "digest"),
        ({"function": 1}, "function"),
        ({"artifact": "x"}, "artifact"),
    ],
)
def test_references_that_are_none(running: Running, ref: dict, param: str) -> None:
    node = operated(running)
    admin = running.client("admin", **{"x-garnish-tenant": running.tenants["acme"]})
    for order in ("prefetch", "evict"):
        reply = admin.post(f"/nodes/n1/{order}", json=ref)
        assert (*error_of(reply), reply.json()["error"]["param"]) == (422, "validation_failed", param)
    assert node.told == []


def test_only_admins_operate(running: Running) -> None:
    node = operated(running)
    routes = [("GET", "adapters"), *(("POST", path) for path in ("prefetch", "evict", "drain", "undrain"))]
    for key, expected in (("acme", (403, "forbidden")), (None, (401, "unauthenticated"))):
        for method, path in routes:
            assert error_of(running.client(key).request(method, f"/nodes/n1/{path}", json={})) == expected
    assert node.told == []


def test_a_draining_node_gets_nothing_new_and_ends_what_runs(start: Callable[..., Running]) -> None:
    """From the moment that the order is answered; the one that runs goes on."""
    running = start()
    node = operated(running, script=hang_after_first)
    client, admin = running.client(), running.client("admin")
    call = {**CALL, "stream": True}
    with client.stream("POST", f"/invoke/{running.base.id}", json=call) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: token"
        item = msgspec.json.decode(admin.post("/nodes/n1/drain").content, type=nodes.NodeItem)
        assert item.record["state"] == "draining"
        listed = msgspec.json.decode(admin.get("/nodes").content, type=nodes.NodeList).nodes
        assert [entry.record["state"] for entry in listed] == ["draining"]
        assert error_of(client.post(f"/invoke/{running.base.id}", json=CALL)) == (503, "unavailable")
        other = operated(running, "n2")
        assert client.post(f"/invoke/{running.base.id}", json=CALL).headers["x-garnish-node"] == "n2"
        node.go_on.set()
        assert "event: done" in list(lines)
    assert len(node.received) == 1
    assert admin.post("/nodes/n2/drain").status_code == 200
    assert admin.post("/nodes/n1/undrain").json()["record"]["state"] == "ready"
    assert client.post(f"/invoke/{running.base.id}", json=CALL).headers["x-garnish-node"] == "n1"
    assert len(other.received) == 1


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"\xc1 not msgpack"),
        (200, msgspec.msgpack.encode({"adapters": [{"digest": DIGEST, "tier": "attic", "bytes": 1}]})),
        (404, b"Not Found"),
        (307, b""),
        (401, b'{"error": {"type": "unauthenticated", "message": "who are you"}}'),
        (418, b'{"error": {"type": "teapot", "message": "short and stout"}}'),
        (200, b"x" * 5000),
    ],
)
def test_a_node_that_answers_nonsense(
    running: Running, answer: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_calls, "ANSWER_BYTES", 4096)
    node = operated(running)
    node.answers["/adapters"] = answer
    assert error_of(running.client("admin").get("/nodes/n1/adapters")) == (502, "node_failed")


def test_a_node_that_is_gone(running: Running) -> None:
    """Its record has not expired yet."""
    with ExitStack() as stack:
        node = OperatedNode("n1", running.base.fingerprint, running.secret, running.base.max_context, echo)
        stack.enter_context(stub_node(node))
        node.publish(running.url)
    admin = running.client("admin")
    for method, path in (("GET", "adapters"), ("POST", "drain"), ("POST", "undrain")):
        assert error_of(admin.request(method, f"/nodes/n1/{path}")) == (502, "node_failed")


def test_what_holds_a_gpu_back_is_named() -> None:
    """Idle clocks (1) and clocks that somebody has set (2) hold nothing back."""
    load = nodes._gpu_load(GpuLoad(memory_used=5, throttled=0x47))
    assert (load["memory_used"], load["power"], load["throttled"]) == (5, None, ["power_cap", "hardware_thermal"])
