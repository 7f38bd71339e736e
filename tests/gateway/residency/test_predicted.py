"""Forecasts and schedules carried out by a real gateway: what its nodes are told, and what callers may see of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest
from command_line import CommandLine
from running_gateway import Running, until, upload
from wanting_node import WantingNode, wanting_node

from cluster.forecast.chances import Forecasts
from cluster.residency import WantedAdapter
from gateway.residency import history, remote_trainer, residency, schedules, standing

CALL = {"prompt": "x", "max_tokens": 1}
OPEN = {"cron": "* * * * *", "for": 3600}


class LastSeen:
    """Forecasts the chance of CHANCE for whatever has been called at all."""

    chance = 0.6

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def observe(self, now: float, counts: Mapping[str, int]) -> None:
        self.keys |= set(counts)

    def forecast(self, now: float) -> Forecasts:
        return Forecasts(sorted(self.keys), np.tile((0.1, 0.2, self.chance, 0.9), (len(self.keys), 1)))

    def error(self) -> dict[str, float]:
        return {"brier_within_30_s": 0.125}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_trainer, "Forecaster", LastSeen)
    monkeypatch.setattr(history, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(residency, "SECOND", 0.05)
    monkeypatch.setattr(residency, "PLAN_SECONDS", 0.05)
    monkeypatch.setattr(schedules, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(standing, "LOOK_SECONDS", 0.05)


@pytest.fixture
def running(start: Callable[..., Running], pirate: dict) -> Running:
    running = start()
    assert running.client().post("/deploy/f", files=pirate).status_code == 201
    return running


def wanted(node: WantingNode) -> dict[str, WantedAdapter]:
    return {each.adapter.digest: each for each in node.wanted[-1][1].adapters} if node.wanted else {}


def digest_of(client: httpx.Client, version: int) -> str:
    return str(client.get(f"/functions/f/versions/{version}").json()["digest"])


def test_a_called_function_is_wanted_where_its_calls_go(
    running: Running, command_line: CommandLine, stories_adapters: dict
) -> None:
    node = wanting_node(running, "n")
    client, first = running.client(), digest_of(running.client(), 1)
    before = client.get("/functions/f/forecast").json()
    assert (before["function"], before["chances"], before["wanted"]) == ("f", None, [])
    node.hold(first, "host")
    assert client.post("/invoke/f", json=CALL).status_code == 200
    until(lambda: first in wanted(node))
    want = wanted(node)[first]
    assert (want.tier, want.chance, want.pinned) == ("device", 0.6, False)
    assert want.adapter.artifact == f"artifacts/v1/{running.base.fingerprint}/{first}"
    told = client.get("/functions/f/forecast").json()
    assert told["chances"] == {"within_1_s": 0.1, "within_5_s": 0.2, "within_30_s": 0.6, "within_300_s": 0.9}
    (place,) = told["wanted"]
    assert (place["node"], place["digest"], place["cause"]) == ("n", first, "forecast")
    assert time.time() - 60 < place["since"] <= time.time()

    # A new version: what calls get now is wanted, before any call got it.
    assert client.post("/deploy/f", files=upload(stories_adapters["dragon"])).status_code == 201
    second = digest_of(client, 2)
    until(lambda: second in wanted(node) or second in {p["digest"] for p in _places(client)})
    until(lambda: first not in wanted(node))

    # Nobody else sees any of it.
    assert running.client("other").get("/functions/f/forecast").status_code == 404
    assert running.client(None).get("/functions/f/forecast").status_code == 401
    metrics = running.client("admin").get("/metrics").text
    assert 'garnish_forecast_error{score="brier_within_30_s"} 0.125' in metrics
    assert 'garnish_wanted_adapters{cause="forecast"} 1.0' in metrics
    environment, folder = os.environ | {"GARNISH_API_KEY": running.keys["acme"]}, Path(running.config.registry)
    shown = command_line.run("describe", "f", "--url", running.url, folder=folder, environment=environment).stdout
    assert "calls expected: 60% within 30 s, 90% within 5 min; wanted on " in shown

    # Deleted: nothing is wanted any more, though calls are still forecast.
    assert client.delete("/functions/f").status_code == 204
    until(lambda: not wanted(node))


def _places(client: httpx.Client) -> list[dict]:
    return list(client.get("/functions/f/forecast").json()["wanted"])


def test_a_function_that_is_not_to_be_prefetched_is_not(running: Running) -> None:
    node, client = wanting_node(running, "n"), running.client()
    digest = digest_of(client, 1)
    assert client.post("/invoke/f", json=CALL).status_code == 200
    until(lambda: digest in wanted(node))
    assert client.patch("/functions/f", json={"prefetch": "off"}).json()["policy"] == {"prefetch": "off"}
    until(lambda: not wanted(node))
    told = len(node.wanted)
    for _ in range(3):
        assert client.post("/invoke/f", json=CALL).status_code == 200
        time.sleep(0.15)  # some plans of those that are made every 50 ms
    assert client.get("/functions/f/forecast").json()["chances"], "it is forecast all the same"
    assert len(node.wanted) == told
    assert client.patch("/functions/f", json={"warm": [OPEN]}).status_code == 200
    until(lambda: digest in wanted(node) and wanted(node)[digest].pinned)
    assert client.patch("/functions/f", json={"warm": None, "prefetch": None}).status_code == 200
    until(lambda: digest in wanted(node) and not wanted(node)[digest].pinned)


def test_a_window_pins_its_function_on_as_many_nodes(running: Running) -> None:
    nodes = [wanting_node(running, f"n{number}") for number in range(3)]
    client, digest = running.client(), digest_of(running.client(), 1)
    shut = {"cron": "0 0 29 2 *", "for": 60}
    assert client.patch("/functions/f", json={"warm": [shut]}).json()["policy"] == {"warm": [shut]}
    patched = client.patch("/functions/f", json={"warm": [shut, OPEN | {"copies": 2}]})
    assert patched.json()["policy"]["warm"][1] == OPEN | {"copies": 2}
    until(lambda: sum(digest in wanted(node) for node in nodes) == 2)
    assert all(wanted(node)[digest].pinned and wanted(node)[digest].tier == "device" for node in nodes if wanted(node))
    assert [place["cause"] for place in _places(client)] == ["schedule"] * 2
    assert client.patch("/functions/f", json={"timeout": 5}).json()["policy"]["timeout"] == 5
    assert client.patch("/functions/f", json={"warm": None}).json()["policy"] == {"timeout": 5}
    until(lambda: not any(wanted(node) for node in nodes))
    for field, body in {
        "warm[0].cron": [OPEN | {"cron": "0 9 * *"}],
        "warm[1].cron": [OPEN, OPEN | {"cron": "0 99 * * *"}],
        "warm[0].copies": [OPEN | {"copies": 99}],
        "warm": [OPEN] * 9,
    }.items():
        refused = client.patch("/functions/f", json={"warm": body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, field)
    assert client.patch("/functions/g", json={"warm": [OPEN]}).status_code == 404


def test_what_was_warmed_by_hand_stays_wanted(running: Running) -> None:
    node, client = wanting_node(running, "n"), running.client()
    reply = client.post("/functions/f/warm", json={"tier": "host"}).json()
    assert (reply["ready"], node.ordered) == (False, [])
    digest = digest_of(client, 1)
    until(lambda: digest in wanted(node))
    assert (wanted(node)[digest].tier, wanted(node)[digest].pinned) == ("host", True)
    assert [place["cause"] for place in _places(client)] == ["order"]
