"""Functions that are warmed by hand, and versions that are warm before they are called: through a real gateway."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from running_gateway import Running, until, upload
from wanting_node import wanting_node

import garnish
from gateway.residency import residency, standing, warm_on_deploy, warming


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked again and again whether what was ordered is there."""
    monkeypatch.setattr(warming, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(warming, "MAX_LOOK_SECONDS", 0.1)


@pytest.fixture
def soon_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("SECOND", "PLAN_SECONDS", "NODES_SECONDS"):
        monkeypatch.setattr(residency, seconds, 0.05)
    monkeypatch.setattr(standing, "LOOK_SECONDS", 0.05)


@pytest.fixture
def running(start: Callable[..., Running], pirate: dict) -> Running:
    running = start()
    assert running.client().post("/deploy/f", files=pirate).status_code == 201
    return running


def test_it_is_brought_to_as_many_nodes_as_are_asked_for_and_once(running: Running) -> None:
    nodes = [wanting_node(running, f"n{i}") for i in range(4)]
    client = running.client()
    reply = client.post("/functions/f/warm")
    assert reply.status_code == 202
    (place,) = reply.json()["places"]
    assert (reply.json()["ready"], reply.json()["tier"], place["version"], place["tier"]) == (
        True,
        "device",
        1,
        "device",
    )
    (first,) = [node for node in nodes if node.ordered]
    assert (first.node_id, len(first.ordered)) == (place["node"], 1)
    assert client.post("/functions/f/warm", json={}).json() == reply.json(), "there is nothing more to do"
    three = client.post("/functions/f/warm", json={"copies": 3}).json()
    assert first.node_id in {each["node"] for each in three["places"]}
    assert (len(three["places"]), three["ready"]) == (3, True)
    assert sorted(len(node.ordered) for node in nodes) == [0, 1, 1, 1]
    all_of_them = client.post("/functions/f/warm", json={"copies": 16}).json()["places"]
    assert {each["node"] for each in all_of_them} == {"n0", "n1", "n2", "n3"}


def test_a_load_that_goes_on_is_not_ordered_again(running: Running) -> None:
    node = wanting_node(running, "n", loads=False)
    client = running.client()
    for _ in range(3):
        body = client.post("/functions/f/warm").json()
        assert (body["ready"], body["places"][0]["tier"], body["places"][0]["error"]) == (False, "absent", None)
    assert len(node.ordered) == 1
    node.hold(node.ordered[0], "host")
    assert client.post("/functions/f/warm").json()["places"][0]["tier"] == "host"
    assert client.post("/functions/f/warm", json={"tier": "host"}).json()["ready"]
    node.hold(node.ordered[0], "device")
    assert client.post("/functions/f/warm").json()["ready"]
    assert len(node.ordered) == 1


def test_what_nodes_refuse_is_said(running: Running) -> None:
    client = running.client()
    assert client.post("/functions/f/warm").status_code == 503, "there is no node"
    node = wanting_node(running, "n", refusal=(413, "too_large"))
    reply = client.post("/functions/f/warm")
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "too_large")
    wanting_node(running, "m")
    both = client.post("/functions/f/warm", json={"copies": 2})
    assert both.status_code == 202
    assert {place["node"]: place["error"] for place in both.json()["places"]} == {"n": "not here", "m": None}
    assert not both.json()["ready"]
    node.refusal = None
    assert client.post("/functions/f/warm", json={"copies": 2}).json()["ready"], "it is asked again"


def test_whose_functions_and_which_versions(running: Running, stories_adapters: dict) -> None:
    node = wanting_node(running, "n")
    client = running.client()
    assert client.post("/deploy/f", files=upload(stories_adapters["dragon"])).status_code == 201
    for key in ("other", None):
        answer = running.client(key).post("/functions/f/warm")
        assert answer.status_code == (404 if key else 401)
    assert running.client("admin").post("/functions/f/warm").status_code == 400
    assert not node.ordered
    admin = running.client("admin", **{"x-garnish-tenant": "acme"})
    assert [each["version"] for each in admin.post("/functions/f/warm").json()["places"]] == [2]
    one = client.post("/functions/f/warm", json={"version": "1"}).json()
    assert [each["version"] for each in one["places"]] == [1]
    assert client.put("/functions/f/aliases/prod", json={"weights": {"1": 0.5, "2": 0.5}}).status_code == 200
    split = client.post("/functions/f/warm", json={"version": "prod"}).json()
    assert [each["version"] for each in split["places"]] == [1, 2]
    assert client.post("/functions/f/warm", json={"version": "9"}).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"tier": "disk"}, {"tier": None}, {"copies": 0}, {"copies": 17}, {"copies": 1.5}, {"copies": "1"},
        {"version": "../f"}, {"version": 1}, {"version": "x" * 65}, {"node": "n"}, [], "device",
    ],
)  # fmt: skip
def test_odd_bodies_are_refused(shared_gateway: Running, body: object) -> None:
    assert shared_gateway.client().post("/functions/f/warm", json=body).status_code == 422


def test_loads_are_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "MAX_TENANT_UNDERWAY", 2)
    nodes = [wanting_node(running, f"n{i}", loads=False) for i in range(3)]
    client = running.client()
    assert client.post("/functions/f/warm", json={"copies": 3}).status_code == 429
    assert not any(node.ordered for node in nodes)
    assert client.post("/functions/f/warm", json={"copies": 2}).status_code == 202


def test_a_deploy_lists_its_version_when_it_is_warm(running: Running, stories_adapters: dict) -> None:
    node = wanting_node(running, "n", loads=False)
    client = running.client()
    with ThreadPoolExecutor(1) as pool:
        files = upload(stories_adapters["dragon"])
        deploy = pool.submit(client.post, "/deploy/f", files=files, params={"warm": "true"})
        until(lambda: bool(node.ordered))
        assert client.get("/functions/f").json()["aliases"] == {"latest": 1}
        node.hold(node.ordered[0], "device")
        reply = deploy.result()
    assert (reply.status_code, reply.json()["warnings"]) == (201, [])
    assert reply.json()["digest"] == node.ordered[0]
    assert client.get("/functions/f").json()["aliases"] == {"latest": 2}


def test_an_alias_moves_when_its_version_is_warm(running: Running, stories_adapters: dict) -> None:
    node = wanting_node(running, "n")
    client = running.client()
    second = client.post("/deploy/f", files=upload(stories_adapters["dragon"])).json()["digest"]
    client.put("/functions/f/aliases/prod", json={"version": 1})
    half = client.put("/functions/f/aliases/prod", json={"weights": {"2": 0.5}}, params={"warm": "true"})
    assert (half.status_code, node.ordered) == (422, []), "nothing is warmed for what can't be"
    moved = client.put("/functions/f/aliases/prod", json={"version": 2}, params={"warm": "true"}).json()
    assert (moved["version"], moved["warnings"], node.ordered) == (2, [], [second])
    back = client.post("/functions/f/rollback", json={"alias": "prod"}, params={"warm": "true"}).json()
    assert (back["version"], back["warnings"], len(node.ordered)) == (1, [], 2)
    again = client.post("/functions/f/rollback", json={"alias": "prod"}, params={"warm": "true"})
    assert again.status_code == 409
    unknown = client.put("/functions/f/aliases/prod", json={"version": 9}, params={"warm": "true"})
    assert unknown.status_code == 404


def test_a_change_that_comes_too_late_warms_nothing(running: Running, stories_adapters: dict) -> None:
    node = wanting_node(running, "n", loads=False)
    client = running.client()
    client.post("/deploy/f", files=upload(stories_adapters["dragon"]))
    late: dict[str, Any] = {"params": {"warm": "true"}, "headers": {"if-match": '"77"'}}
    assert client.put("/functions/f/aliases/latest", json={"version": 1}, **late).status_code == 412
    assert client.post("/functions/f/rollback", **late).status_code == 412
    assert node.ordered == []


def test_deploys_that_wait_to_be_warm_hold_up_nobody(running: Running, stories_adapters: dict) -> None:
    """As many as one tenant may store at once wait for a node that never gets ready."""
    node = wanting_node(running, "n", loads=False)
    client = running.client()
    with ThreadPoolExecutor(2) as pool:
        warm = [
            pool.submit(client.post, f"/deploy/w{i}", files=upload(stories_adapters["dragon"]), params={"warm": "true"})
            for i in range(2)
        ]
        until(lambda: bool(node.ordered))
        for i in range(3):
            assert client.post(f"/deploy/p{i}", files=upload(stories_adapters["ocean"])).status_code == 201
        assert not any(each.done() for each in warm)
        node.hold(node.ordered[0], "device")
        assert [each.result().status_code for each in warm] == [201, 201]


@pytest.mark.usefixtures("soon_planned")
def test_what_is_ordered_of_a_deleted_function_is_wanted_no_more(running: Running) -> None:
    node = wanting_node(running, "n")
    client = running.client()
    assert client.post("/functions/f/warm", json={"tier": "host"}).status_code == 202
    until(lambda: bool(node.wanted and node.wanted[-1][1].adapters))
    assert client.delete("/functions/f").status_code in (200, 204)
    until(lambda: not node.wanted[-1][1].adapters)


def test_host_memory_that_is_too_small_is_said_at_once(running: Running) -> None:
    wanting_node(running, "n", adapter_bytes=4096, host_bytes=4096)
    refused = running.client().post("/functions/f/warm", json={"tier": "host"})
    assert refused.status_code == 409
    assert "get 512 of host memory" in refused.json()["error"]["message"]


def test_what_does_not_get_warm_takes_calls_with_a_warning(
    running: Running, stories_adapters: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(warm_on_deploy, "WARM_SECONDS", 0.1)
    client = running.client()
    files = upload(stories_adapters["dragon"])
    without = client.post("/deploy/f", files=files, params={"warm": "true"})
    assert (without.status_code, len(without.json()["warnings"])) == (201, 1)
    assert "no node is ready" in without.json()["warnings"][0]
    wanting_node(running, "n", loads=False)
    moved = client.put("/functions/f/aliases/prod", json={"version": 1}, params={"warm": "true"})
    assert (moved.status_code, len(moved.json()["warnings"])) == (200, 1)
    assert "on its way" in moved.json()["warnings"][0]


def test_what_can_never_get_warm_is_not_waited_for(running: Running, stories_adapters: dict) -> None:
    """An adapter that is too large for its node is asked for once in the minute that a deploy would wait."""
    client = running.client()
    node = wanting_node(running, "n", refusal=(413, "too_large"))
    began = time.monotonic()
    reply = client.post("/deploy/f", files=upload(stories_adapters["dragon"]), params={"warm": "true"})
    assert "not here" in reply.json()["warnings"][0]
    assert len(node.ordered) == 1
    assert time.monotonic() - began < warm_on_deploy.WARM_SECONDS


def test_the_client_and_the_command_line(running: Running, command_line: CommandLine) -> None:
    wanting_node(running, "n")
    key = running.keys["acme"]
    with garnish.Client(running.url, key) as client:
        reply = client.warm("f", "latest", copies=2)
        assert (reply.ready, [place.node for place in reply.places]) == (True, ["n"])
        assert client.set_alias("f", "prod", 1, warm=True).warnings == []
    command = ["warm", "f:prod", "--tier", "host", "--json", "--url", running.url]
    environment, folder = os.environ | {"GARNISH_API_KEY": key}, Path(running.config.registry)
    told = command_line.run(*command, folder=folder, environment=environment)
    assert json.loads(told.stdout)["places"] == [{"version": 1, "node": "n", "tier": "device", "error": None}]
