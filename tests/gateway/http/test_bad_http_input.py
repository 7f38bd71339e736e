"""Bodies, names and headers that are wrong, each answered in the contract's shape; the next request works."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest
from raw_http import send
from running_gateway import Running, plain_client
from starlette.routing import Route

from gateway.app import ROUTES

PATH = "/invoke/stories260K"


@pytest.fixture
def gateway(shared_gateway: Running) -> Running:
    """The module's, whose node has received nothing, and which has no functions."""
    with plain_client(shared_gateway.url, {"x-api-key": shared_gateway.keys["acme"]}) as client:
        assert client.delete("/functions/pirate", params={"force": "true"}).status_code in (204, 404)
        assert client.get("/functions").json()["functions"] == []
    shared_gateway.nodes[0].received.clear()
    return shared_gateway


def head(running: Running, path: str, length: int | None, extra: str = "") -> str:
    stated = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\nhost: x\nx-api-key: {running.keys['acme']}\n{stated}{extra}"


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "prompt": "y"}',
        b"[" * 200_000,
        b'{"metadata":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": "x"} {"prompt": "y"}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_json_answers_400(gateway: Running, path: str, body: bytes) -> None:
    client = gateway.client()
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"] if path.startswith("/v1") else error["type"]) == "invalid_request"
    assert client.post(PATH, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": "x", "surprise": 1}, "surprise"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 511}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "3"}, "max_tokens"),
        ({"prompt": "x", "temperature": -0.1}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "min_p": 1.5}, "min_p"),
        ({"prompt": "x", "seed": -1}, "seed"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "x", "timeout": 0}, "timeout"),
        ({"prompt": "x", "timeout": 10**6}, "timeout"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "word " * 1000}, "prompt"),
    ],
)
def test_wrong_fields_answer_422_and_name_them(gateway: Running, body: object, param: str | None) -> None:
    reply = gateway.client().post(PATH, json=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (422, "validation_failed")
    named = reply.json()["error"]["param"]
    assert named == param or (param == "stop" and named.startswith("stop"))
    assert gateway.nodes[0].received == []


def test_another_content_type(gateway: Running) -> None:
    reply = gateway.client().post(PATH, content=b"prompt=x", headers={"content-type": "text/plain"})
    assert reply.status_code == 415


@pytest.mark.parametrize("stated", [True, False])
def test_oversized_call(gateway: Running, stated: bool) -> None:
    client = gateway.client()
    body = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'
    content = body if stated else (body[at : at + 65536] for at in range(0, len(body), 65536))
    reply = client.post(PATH, content=content, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "too_large")
    assert client.post(PATH, json={"prompt": "x"}).status_code == 200


def test_stated_length_alone_is_refused(gateway: Running) -> None:
    status, reply = send(gateway.url, head(gateway, PATH, 10**15))
    assert (status, reply["error"]["type"]) == (413, "too_large")


def test_a_sender_far_over_the_limit_reads_why(gateway: Running) -> None:
    """It reads only when it has sent all of it."""
    for _ in range(5):
        status, reply = send(gateway.url, head(gateway, PATH, 20_000_000), b"x" * 20_000_000)
        assert (status, reply["error"]["type"]) == (413, "too_large")


@pytest.mark.parametrize("limits", [{"body_idle_seconds": 0.1}, {"body_seconds": 0.1}])
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_slow_body(start: Callable[..., Running], limits: dict, path: str) -> None:
    running = start(**limits)
    status, reply = send(running.url, head(running, path, 1000), b'{"prompt"')
    assert status == 400
    assert "did not arrive in time" in reply["error"]["message"]


def test_slow_upload(start: Callable[..., Running]) -> None:
    running = start(body_idle_seconds=0.1)
    kind = "\ncontent-type: multipart/form-data; boundary=b"
    status, reply = send(running.url, head(running, "/deploy/f", 1000, kind), b"--b\r\n")
    assert (status, reply["error"]["type"]) == (400, "invalid_request")


def test_half_a_body_and_gone(gateway: Running) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(head(gateway, PATH, 1000).replace("\n", "\r\n").encode() + b"\r\n\r\n{")
    assert gateway.client().post(PATH, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a%00b", "x" * 300, "%ff", "A", "a/b", "..%2f..%2fetc"])
@pytest.mark.parametrize("route", ["GET /functions/", "DELETE /functions/", "POST /invoke/", "GET /v1/models/"])
def test_malformed_names_are_not_found(gateway: Running, name: str, route: str) -> None:
    request = f"{route}{name} HTTP/1.1\nhost: x\nx-api-key: {gateway.keys['acme']}\ncontent-length: 14"
    status, reply = send(gateway.url, request, b'{"prompt":"x"}')
    error = reply["error"]
    assert (status, error.get("code") or error["type"]) == (404, "model_not_found" if "/v1" in route else "not_found")


@pytest.mark.parametrize("name", ["../x", "a:b", "pirate:../../x", "pirate:\x00", "no such", "é"])
def test_malformed_models_are_not_found(gateway: Running, name: str) -> None:
    reply = gateway.client().post("/v1/completions", json={"model": name, "prompt": "x"})
    assert reply.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/nowhere", 404, "not_found"),
        ("PATCH", "/functions", 405, "method_not_allowed"),
        ("GET", "/explain/req_1", 404, "not_found"),
        ("POST", "/batches", 404, "not_found"),
    ],
)
def test_routes_that_do_not_exist(gateway: Running, method: str, path: str, status: int, kind: str) -> None:
    reply = gateway.client().request(method, path)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]
    assert set(reply.json()["error"]) == {"type", "message", "param", "request_id"}


def test_405_says_what_is_allowed(gateway: Running) -> None:
    assert "DELETE" in gateway.client().put("/functions/f").headers["allow"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/deploy/a%0a?dry_run=true", 422),
        ("POST", "/deploy/a%0ab?dry_run=true", 422),
        ("POST", "/deploy/%0a", 422),
        ("POST", "/invoke/stories260K%0a", 404),
        ("POST", "/invoke/pirate%0a", 404),
        ("POST", "/invoke/pirate:latest%0a", 404),
        ("GET", "/v1/models/pirate%0a", 404),
        ("GET", "/v1/models/stories260K%0a", 404),
        ("GET", "/functions/pirate%0a", 404),
        ("GET", "/functions/pirate/versions%0a", 404),
        ("GET", "/functions%0a", 404),
        ("GET", "/healthz%0a", 404),
    ],
)
def test_a_newline_is_part_of_the_path(gateway: Running, pirate: dict, method: str, path: str, status: int) -> None:
    client = gateway.client()
    assert client.post("/deploy/pirate", files=pirate).status_code == 201
    sent = {"files": pirate} if "deploy" in path else {"json": {"prompt": "x"}} if method == "POST" else {}
    assert client.request(method, path, **sent).status_code == status


OWN_PARAMETERS = {"deploy": "dry_run", "delete": "force", "invoke": "qualifier", "list_functions": "after"}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_route_refuses_unknown_and_repeated_parameters(gateway: Running, pirate: dict, route: Route) -> None:
    path = re.sub(r"{[^}]*}", "f", route.path)
    for method in sorted((route.methods or set()) - {"HEAD"}):
        sent = {"files": pirate} if route.path.startswith("/deploy") else {}
        secret = {"authorization": f"Bearer {gateway.secret}"} if "/cluster" in path else {}
        client = gateway.client("admin", **{"x-garnish-tenant": "acme"})
        known = OWN_PARAMETERS.get("delete" if method == "DELETE" else route.name, "")
        for query in ["dryrun=true", "=", "limit2="] + [f"{known}=true&{known}=true"] * bool(known):
            reply = client.request(method, f"{path}?{query}", **sent, headers=secret)
            assert reply.status_code == (400 if path.startswith("/v1") else 422), (method, path, query)
            assert reply.json()["error"]["param"] == query.split("=")[0], query
    assert gateway.client().get("/functions/f").status_code == 404  # nothing was done


@pytest.mark.parametrize("given", ["a b", "x" * 129, "ü", "a\tb", ""])
def test_insane_request_ids_are_replaced(gateway: Running, given: str) -> None:
    reply = gateway.client().get("/healthz", headers={b"x-request-id": given.encode("latin-1")})
    assert reply.headers["x-request-id"].startswith("req_")


def test_queries_are_strict(gateway: Running) -> None:
    client = gateway.client()
    for path in ("/functions?limit=0", "/functions?limit=x", "/functions?limit=1e3", "/functions?order=up"):
        assert client.get(path).status_code == 422, path
    assert client.delete("/functions/f?force=1").status_code == 422
    assert client.get("/v1/models/nobody?x=1").status_code in (400, 404)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "x", "k" * 300_000: 1}),
        (PATH, {"messages": [{"role": "r" * 300_000, "content": "x"}]}),
        ("/v1/completions", {"model": "stories260K", "prompt": "x", "k" * 300_000: 1}),
        ("/functions/f/rollback", {"é" * 100_000: 1}),
    ],
)
def test_an_error_does_not_repeat_what_was_sent_without_end(
    gateway: Running, path: str, body: dict[str, object]
) -> None:
    reply = gateway.client().post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code in (400, 422)
    assert (len(error["message"]), error["message"][-1]) == (1000, "…")
    assert error["param"] is None or len(error["param"]) <= 200
