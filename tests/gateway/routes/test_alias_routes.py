"""Aliases over HTTP: moved, compared, rolled back, and what stands in the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_gateway import Running, upload

from adapters import registry as registry_module
from gateway.places.pools import FIXED_POOLS

ADAPTERS = ("pirate", "dragon", "space", "ocean")
[WRITES] = (pool for pool in FIXED_POOLS if pool.name == "store_writes")


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture
def client(gateway: Running, stories_adapters: dict[str, Path]) -> httpx.Client:
    """Function `f` has the versions 1 to 4, and `latest` has pointed to each of them."""
    client = gateway.client()
    for name in ADAPTERS:
        assert client.post("/deploy/f", files=upload(stories_adapters[name])).status_code == 201
    return client


def called(client: httpx.Client, target: str = "f") -> int:
    reply = client.post(f"/invoke/{target}", json={"prompt": "x", "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-garnish-version"] == str(reply.json()["version"])
    version: int = reply.json()["version"]
    return version


def test_an_alias_is_made_moved_and_called(client: httpx.Client) -> None:
    made = client.put("/functions/f/aliases/prod", json={"version": 2})
    assert made.status_code == 200
    body = made.json()
    assert body | {"since": 0} == {
        "function": "f",
        "alias": "prod",
        "version": 2,
        "weights": {"2": 1.0},
        "since": 0,
        "changes": 1,
        "generation": 6,
        "history": [],
        "warnings": [],
    }
    assert made.headers["etag"] == '"6"'
    assert called(client, "f:prod") == 2
    moved = client.put("/functions/f/aliases/prod", json={"weights": {"2": 0.5, "3": 0.5}})
    assert (moved.json()["version"], moved.json()["weights"]) == (None, {"2": 0.5, "3": 0.5})
    assert [past["version"] for past in moved.json()["history"]] == [2]
    assert client.get("/functions/f/aliases/prod").json() == moved.json()
    shown = client.get("/functions/f")
    assert shown.json()["aliases"] == {"latest": 4, "prod": {"2": 0.5, "3": 0.5}}
    assert shown.headers["etag"] == moved.headers["etag"] == f'"{shown.json()["generation"]}"'
    again = client.put("/functions/f/aliases/prod", json={"weights": {"2": 0.5, "3": 0.5, "4": 0}})
    assert again.json() == moved.json()  # nothing changed, so there is nothing to remember


def test_whoever_is_slower_is_told(client: httpx.Client) -> None:
    tag = client.get("/functions/f").headers["etag"]

    def move(version: int, matches: str) -> httpx.Response:
        return client.put("/functions/f/aliases/prod", json={"version": version}, headers={"if-match": matches})

    first = move(1, tag)
    assert first.status_code == 200
    late = move(2, tag)
    assert (late.status_code, late.json()["error"]["type"]) == (412, "precondition_failed")
    assert client.get("/functions/f/aliases/prod").json()["version"] == 1
    assert move(2, f'"0", {first.headers["etag"]}').status_code == 200
    assert move(3, "*").status_code == 200
    current = client.get("/functions/f").headers["etag"]
    assert move(4, f"W/{current}").status_code == 412  # a weak tag is not surely the same
    assert move(4, '"odd"').status_code == 412
    assert move(4, 'W/"jz", "", W/""').status_code == 412
    assert move(4, current.strip('"')).status_code == 200
    odd = move(1, 'odd"')
    assert (odd.status_code, odd.json()["error"]["param"]) == (422, "if-match")
    assert move(1, f"*, {current}").status_code == 422
    for method, path, body in [
        ("POST", "/functions/f/rollback", {"alias": "prod"}),
        ("PATCH", "/functions/f", {"timeout": 5}),
        ("DELETE", "/functions/f/versions/1", None),
    ]:
        reply = client.request(method, path, json=body, headers={"if-match": tag})
        assert reply.status_code == 412, path
        now = client.get("/functions/f").headers["etag"]
        assert client.request(method, path, json=body, headers={"if-match": now}).status_code in (200, 204), path
    assert client.delete("/functions/f", headers={"if-match": tag}).status_code == 412
    assert client.delete("/functions/f", headers={"if-match": "*"}).status_code == 204


def test_conditions_that_would_not_be_kept_are_refused(client: httpx.Client) -> None:
    before = client.get("/functions/f").json()
    tag = f'"{before["generation"]}"'
    for conditions in ({"if-none-match": "*"}, {"if-none-match": tag}, {"if-match": tag, "if-none-match": tag}):
        for method, path, body in [
            ("PUT", "/functions/f/aliases/prod", {"version": 1}),
            ("POST", "/functions/f/rollback", {}),
            ("PATCH", "/functions/f", {"timeout": 5}),
            ("DELETE", "/functions/f/versions/1", None),
            ("DELETE", "/functions/f", None),
        ]:
            reply = client.request(method, path, json=body, headers=conditions)
            assert (reply.status_code, reply.json()["error"]["param"]) == (422, "if-none-match"), (method, path)
    assert client.get("/functions/f").json() == before


def test_tags_in_several_lines_are_one_list(client: httpx.Client) -> None:
    tag = client.get("/functions/f").headers["etag"]
    lines = [("if-match", '"0"'), ("if-match", tag)]
    assert client.put("/functions/f/aliases/prod", json={"version": 1}, headers=lines).status_code == 200
    assert client.put("/functions/f/aliases/prod", json={"version": 2}, headers=lines).status_code == 412


def test_rollbacks_go_down_the_history(client: httpx.Client) -> None:
    assert called(client) == 4
    for version in (3, 2, 1):
        reply = client.post("/functions/f/rollback", json={"alias": "latest"})
        assert (reply.status_code, reply.json()["version"]) == (200, version)
        assert called(client) == version  # at once
    end = client.post("/functions/f/rollback")  # `latest` when none is named
    assert (end.status_code, end.json()["error"]["type"]) == (409, "conflict")
    assert called(client) == 1
    history = client.get("/functions/f/aliases/latest").json()["history"]
    assert [past["version"] for past in history] == [2, 3, 4, 3, 2, 1]
    assert client.put("/functions/f/aliases/latest", json={"version": 4}).status_code == 200
    assert client.post("/functions/f/rollback", json={}).json()["version"] == 1


def test_a_redeploy_of_older_bytes_moves_the_alias_and_is_rolled_back(
    client: httpx.Client, stories_adapters: dict[str, Path]
) -> None:
    older = client.post("/deploy/f", files=upload(stories_adapters["dragon"]))
    assert (older.status_code, older.json()["version"]) == (200, 2)
    assert called(client) == 2
    assert client.post("/functions/f/rollback").json()["version"] == 4
    assert called(client) == 4


def test_versions_are_deleted_unless_an_alias_names_them(client: httpx.Client) -> None:
    client.put("/functions/f/aliases/prod", json={"weights": {"1": 0.5, "2": 0.5}})
    for version in (1, 2, 4):
        reply = client.delete(f"/functions/f/versions/{version}")
        assert (reply.status_code, reply.json()["error"]["type"]) == (409, "conflict")
    assert "latest" in reply.json()["error"]["message"]
    assert called(client, "f:3") == 3
    assert client.delete("/functions/f/versions/3").status_code == 204
    assert client.post("/invoke/f:3", json={"prompt": "x"}).status_code == 404  # at once
    for method, path in [
        ("DELETE", "/functions/f/versions/3"),
        ("GET", "/functions/f/versions/3"),
        ("DELETE", "/functions/f/versions/x"),
        ("DELETE", "/functions/f/versions/0"),
    ]:
        assert client.request(method, path).status_code == 404, path
    assert [entry["version"] for entry in client.get("/functions/f").json()["versions"]] == [1, 2, 4]
    assert client.post("/functions/f/rollback").json()["version"] == 2  # 3, in between, is gone


def test_a_deleted_versions_number_is_not_used_again(client: httpx.Client, stories_adapters: dict[str, Path]) -> None:
    client.delete("/functions/f/versions/3")
    again = client.post("/deploy/f", files=upload(stories_adapters["space"]))
    assert (again.status_code, again.json()["version"]) == (201, 5)
    assert called(client) == 5


def test_targets_that_are_none(client: httpx.Client) -> None:
    cases: list[tuple[str, dict[str, Any], int, str | None]] = [
        ("prod", {}, 422, "version"),
        ("prod", {"version": 1, "weights": {"1": 1}}, 422, "version"),
        ("prod", {"version": "1"}, 422, "version"),
        ("prod", {"version": 0}, 422, "version"),
        ("prod", {"version": 1, "odd": 1}, 422, "odd"),
        ("prod", {"weights": {}}, 422, "weights"),
        ("prod", {"weights": {"1": 0.5}}, 422, "weights"),
        ("prod", {"weights": {"1": 0.5, "2": 0.6}}, 422, "weights"),
        ("prod", {"weights": {"1": 0}}, 422, "weights"),
        ("prod", {"weights": {str(version): 1 / 11 for version in range(1, 12)}}, 422, "weights"),
        ("prod", {"version": 5}, 404, None),
        ("prod", {"weights": {"1": 0.5, "9": 0.5}}, 404, None),
        ("12", {"version": 1}, 404, None),
        ("Prod", {"version": 1}, 404, None),
        ("a" * 70, {"version": 1}, 404, None),
        ("%2e%2e%2f", {"version": 1}, 404, None),  # another path
    ]
    for alias, body, status, param in cases:
        reply = client.put(f"/functions/f/aliases/{alias}", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), (alias, body)
    for weights in ('{"1": -0.5, "2": 1.5}', '{"01": 1}', '{"x": 1}', '{"1": "1"}', '{"1": NaN}', "[]"):
        body = f'{{"weights": {weights}}}'.encode()
        reply = client.put("/functions/f/aliases/prod", content=body, headers={"content-type": "application/json"})
        expected = (400, None) if "NaN" in weights else (422, "weights")
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == expected, weights
        assert "`$" not in error["message"]
    assert client.get("/functions/f").json()["aliases"] == {"latest": 4}


def test_a_rollback_waits_for_no_deploy(
    start: Callable[..., Running], stories_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = WRITES.size + 1
    limits = {"max_deploys": 2 * many, "max_uploads": 2 * many}
    running = start(**limits, max_tenant_deploys=many, max_tenant_uploads=many, store_seconds=20.0)
    client = running.client()
    for name in ADAPTERS:
        client.post("/deploy/f", files=upload(stories_adapters[name]))
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def check_values(*arguments: Any) -> Any:
        begun.release()
        go_on.wait(60)
        return checked(*arguments)

    checked = registry_module.check_values
    monkeypatch.setattr(registry_module, "check_values", check_values)
    files = upload(stories_adapters["pirate"])
    with ThreadPoolExecutor(many) as pool:
        deploys = [pool.submit(client.post, f"/deploy/g{number}", files=files) for number in range(many)]
        try:
            assert all(begun.acquire(timeout=60) for _ in range(many))
            reply = client.post("/functions/f/rollback")
            assert (reply.status_code, reply.json()["version"]) == (200, 3)
        finally:
            go_on.set()
        assert [deploy.result().status_code for deploy in deploys] == [201] * many


def test_others_aliases_do_not_exist(gateway: Running, client: httpx.Client) -> None:
    other = gateway.client("other")
    for method, path, body in [
        ("GET", "/functions/f/aliases/latest", None),
        ("PUT", "/functions/f/aliases/latest", {"version": 1}),
        ("POST", "/functions/f/rollback", {"alias": "latest"}),
        ("PATCH", "/functions/f", {"timeout": 5}),
        ("DELETE", "/functions/f/versions/1", None),
    ]:
        theirs = other.request(method, path, json=body)
        nobodys = other.request(method, path.replace("/f", "/g", 2).replace("/gunctions", "/functions"), json=body)
        assert (theirs.status_code, nobodys.status_code) == (404, 404), path
        assert theirs.json()["error"]["message"].replace("'f'", "'g'") == nobodys.json()["error"]["message"]
    assert client.get("/functions/f").json()["generation"] == 5


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_two_gateways_write_one_function_and_nothing_is_lost(
    start: Callable[..., Running], stories_adapters: dict[str, Path], seconds: int
) -> None:
    """For a minute in the long form, with looks at the history before it forgets its oldest."""
    clients = [start().client() for _ in range(2)]
    for name in ADAPTERS:
        clients[0].post("/deploy/f", files=upload(stories_adapters[name]))
    at_once, until = threading.Barrier(2), time.monotonic() + seconds

    def history(client: httpx.Client) -> set[str]:
        alias = client.get("/functions/f/aliases/prod").json()
        return {str(alias["weights"]), *(str(past["weights"]) for past in alias["history"])}

    def write(number: int) -> tuple[set[str], set[str]]:
        client, acknowledged, seen = clients[number], set[str](), set[str]()
        at_once.wait(10)
        for step in count():
            if step >= 20 and time.monotonic() > until:
                return acknowledged, seen | history(client)
            share = (1 + 2 * step + number) / 1_000_000
            weights = {"1": 1 - share, str(2 + step % 3): share}
            reply = client.put("/functions/f/aliases/prod", json={"weights": weights})
            assert reply.status_code == 200, reply.text
            acknowledged.add(str(weights))
            if step % 100 == 99:
                seen |= history(client)
        raise AssertionError("unreachable")

    with ThreadPoolExecutor(2) as pool:
        (first, first_seen), (second, second_seen) = pool.map(write, range(2))
    seen = first_seen | second_seen | history(clients[0])
    assert seen == first | second
    for client in clients:
        assert client.get("/functions/f/aliases/prod").json()["changes"] == len(first) + len(second)
