"""A registry on S3 between a gateway and a node that share no disk: versions under load, and all of it killed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from acknowledged import FUNCTION, Acknowledged, Load, lost, miscounted, usage, variant
from two_hosts import TwoHosts, two_hosts
from whole_service import MakeService, eventually

from tests.support.s3_proxy import Fault, Proxy

REGISTRY = "s3://garnish-tests/two-hosts"
GREEDY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
CALLERS = 4
LONG = pytest.mark.slow, pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def hosts(
    make_service: MakeService, s3_endpoint: str, stories_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoHosts]:
    with Proxy(s3_endpoint) as gateway_store, Proxy(s3_endpoint) as node_store:
        gateway = make_service(stories_dir, registry=REGISTRY)
        made = two_hosts(gateway, tmp_path_factory.mktemp("node"), gateway_store, node_store)
        try:
            made.start()
            made.wait_until_ready()
            yield made
        finally:
            made.kill()


def chosen(http: httpx.Client, function: str, calls: int) -> Counter[str]:
    """How many calls of the function's `prod` got each version."""

    def call(number: int) -> str:
        headers = {"x-request-id": f"canary-{number}"}
        reply = http.post(f"/invoke/{function}:prod", json={**GREEDY, "max_tokens": 1}, headers=headers)
        return reply.raise_for_status().headers["x-garnish-version"]

    with ThreadPoolExecutor(CALLERS) as pool:
        return Counter(pool.map(call, range(calls)))


class Moves:
    """What an alias may name at a time: a move holds from some moment between its request and its reply."""

    def __init__(self, versions: set[int]) -> None:
        self._spans: list[tuple[float, float, set[int]]] = [(0.0, float("inf"), versions)]

    def make(self, http: httpx.Client, method: str, path: str, body: dict[str, Any]) -> None:
        begin = time.monotonic()
        reply = http.request(method, path, json=body).raise_for_status().json()
        first, _, before = self._spans[-1]
        self._spans[-1] = first, time.monotonic(), before
        self._spans.append((begin, float("inf"), {int(version) for version in reply["weights"]}))

    def named(self, begin: float, end: float) -> set[int]:
        """Versions that a call between these times may have got."""
        return set().union(*(versions for first, last, versions in self._spans if first <= end and begin <= last))


def call_until(
    done: threading.Event, http: httpx.Client, function: str, seen: list[tuple[float, float, httpx.Response]]
) -> None:
    while not done.is_set():
        begin = time.monotonic()
        reply = http.post(f"/invoke/{function}:prod", json=GREEDY)
        seen.append((begin, time.monotonic(), reply))


@pytest.mark.parametrize(
    ("calls", "fewest", "most"), [(200, 7, 33), pytest.param(1000, 70, 130, marks=LONG)], ids=["short", "long"]
)
def test_deploy_canary_rollback_delete(
    hosts: TwoHosts, stories_adapters: dict[str, Path], calls: int, fewest: int, most: int
) -> None:
    """Bounds are three standard deviations of a binomial distribution; the request ids, and so the sides, are fixed."""
    hosts.node_store.faults += [Fault("reset", "artifacts/"), Fault("cut", "artifacts/")]
    known: dict[int, tuple[str, str]] = {}
    name = f"story-{calls}"
    with hosts.gateway.client("acme") as http:
        for version, adapter in ((1, "dragon"), (2, "ocean")):
            deployed = (
                http.post(f"/deploy/{name}", files=variant(stories_adapters[adapter], calls)).raise_for_status().json()
            )
            first, second = (http.post(f"/invoke/{name}:{version}", json=GREEDY) for _ in range(2))
            assert (first.status_code, second.status_code) == (200, 200), (first.text, hosts.output())
            states = [reply.headers["x-garnish-cold-start"] for reply in (first, second)]
            assert (deployed["version"], states) == (version, ["absent", "none"])
            assert first.json()["output"] == second.json()["output"]
            known[version] = (deployed["digest"], first.json()["output"]["text"])
        assert known[1][1] != known[2][1]

        prod = f"/functions/{name}/aliases/prod"
        http.put(prod, json={"weights": {"1": 0.9, "2": 0.1}}).raise_for_status()
        share = chosen(http, name, calls)
        assert share["1"] + share["2"] == calls
        assert fewest <= share["2"] <= most

        moves = Moves({1, 2})
        seen = roll_back_under_load(hosts, http, moves, name, rounds=calls // 50)
        assert {reply.json()["version"] for _, _, reply in seen} == {1, 2}
        for begin, end, reply in seen:
            found = reply.json()
            assert (found["digest"], found["output"]["text"]) == known[found["version"]]
            assert found["version"] in moves.named(begin, end)

        assert http.delete(f"/functions/{name}/versions/1").status_code == 409
        assert http.delete(f"/functions/{name}").status_code == 204
        assert http.post(f"/invoke/{name}:prod", json=GREEDY).status_code == 404
        assert name not in [entry["name"] for entry in http.get("/functions").json()["functions"]]
    assert {request.split()[0] for request in hosts.node_store.requests} <= {"GET", "HEAD"}, "a node never writes"
    assert hosts.gateway_store.faults[-1].times == hosts.node_store.faults[-1].times == 0
    assert eventually(hosts.gateway.nothing_held), hosts.gateway.node()


def roll_back_under_load(
    hosts: TwoHosts, http: httpx.Client, moves: Moves, function: str, rounds: int
) -> list[tuple[float, float, httpx.Response]]:
    """Forth and back again while the store falters; returns all calls: when begun, when ended, and their replies."""
    prod, seen = f"/functions/{function}/aliases/prod", list[tuple[float, float, httpx.Response]]()
    done = threading.Event()
    with ThreadPoolExecutor(CALLERS) as pool:
        callers = [pool.submit(call_until, done, http, function, seen) for _ in range(CALLERS)]
        try:
            moves.make(http, "PUT", prod, {"version": 1})
            for _ in range(rounds):
                hosts.gateway_store.faults[:] = [
                    Fault("refuse", "PUT", status=503, code="SlowDown"),
                    Fault("lose", "PUT"),
                    Fault("reset", "GET"),
                ]
                moves.make(http, "PUT", prod, {"version": 2})
                so_far = len(seen)
                assert eventually(lambda so_far=so_far: len(seen) > so_far + 2 * CALLERS)  # type: ignore[misc]
                moves.make(http, "POST", f"/functions/{function}/rollback", {"alias": "prod"})
        finally:
            done.set()
        for caller in callers:
            caller.result()
    assert {reply.status_code for _, _, reply in seen} == {200}
    return seen


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=LONG)], ids=["short", "long"])
def test_everything_is_killed_and_nothing_acknowledged_is_lost(
    hosts: TwoHosts, stories_adapters: dict[str, Path], rounds: int
) -> None:
    """Gateway and node are killed in the midst of changes and calls, again and again."""
    draw, known, adapter = random.Random(rounds), Acknowledged(), stories_adapters["dragon"]
    with hosts.gateway.client("acme") as http:
        for number in (1, 2):
            deployed = http.post(f"/deploy/{FUNCTION}", files=variant(adapter, number)).raise_for_status().json()
            known.versions[deployed["version"]] = deployed["digest"]
        moved = http.put(f"/functions/{FUNCTION}/aliases/prod", json={"version": 1}).raise_for_status().json()
        known.moves[moved["changes"]] = moved["weights"]
    before = usage(hosts.gateway)
    for number in range(1, rounds + 1):
        known.used, known.unsure = {}, 0
        hosts.wait_until_ready()
        with Load(hosts.gateway, adapter, known, seed=100 * rounds + number) as load:
            hosts.gateway_store.faults[:] = [Fault("refuse", "PUT", status=503, code="SlowDown")]
            assert eventually(lambda load=load: load.problems or load.did_each(2), 60), known  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.5))
            load.announce_end()
            killed = " ".join(hosts.kill().values())
        assert load.problems == []
        for process in ("main gateway", "main node", "node_agent.api", "engine_process", "worker_process"):
            assert process in killed
        hosts.start()
        assert lost(hosts.gateway, known) == []
        after = usage(hosts.gateway)
        assert miscounted(before, after, known) == []
        before = after
    hosts.wait_until_ready()
    with hosts.gateway.client("acme") as http:
        served = [http.post(f"/invoke/{FUNCTION}:{version}", json=GREEDY) for version in known.versions]
    assert [(reply.status_code, reply.json().get("digest")) for reply in served] == [
        (200, digest) for digest in known.versions.values()
    ]
    verified = hosts.gateway.run("registry", "verify", "--state", "state")
    assert verified.returncode == 0, verified
