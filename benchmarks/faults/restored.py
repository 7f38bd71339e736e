"""Recovery after SIGKILL: provisioned copies of a node, and the gateway's leader.

Three nodes of `garnish up` on this host share functions with one device copy each. In every round the supervisor of the
node with the most copies is killed, and its processes with it. `first_s` and `all_s` are until the first and the last
of its copies are on others' devices, as the gateway reports; `link_share`: of the simulated store's rate,
what the node that got most bytes had between its first copy and its last (0: too few to say). It is a little above the
truth, for two copies load at once, and part of the second one came before the first was whole.

`leader_s`: from the kill of the gateway worker that leads until another one says that it does, as `/metrics` has it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.common.http_service import HttpService
from benchmarks.common.report import STORIES, arguments, publish, report
from benchmarks.faults.rest import children, leader
from tests.support.peft_reference import make_adapter
from tests.support.redis_server import redis_server

NODES, QUICK_NODES = 3, 2
COPIES, QUICK_COPIES = (1, 24), (6,)
RANK = 16
STORE = 1_000_000
"""Bytes per second at which adapters reach a node."""
GATEWAY_WORKERS = 3
READY_S, BACK_S = 120.0, 60.0
LOOK_S = 0.02

Places = dict[str, str]
"""The node with the device copy, by function."""


def measure(model: Path, copies: int, rounds: int, nodes: int, root: Path) -> list[dict[str, float]]:
    adapters = [make_adapter(model, root / f"adapter{number}", number, r=RANK) for number in range(copies)]
    node = f", adapter_memory: 64MiB, host_memory: 64MiB, kv_memory: 64MiB, simulate: {{store: {STORE}B/s}}"
    options = ("--nodes", str(nodes))
    with (
        HttpService(model, adapters, root / "service", "float32", 1, node, "", options) as service,
        service.client() as client,
        service.client(admin=True) as operator,
    ):
        for number in range(copies):
            client.patch(f"/functions/a{number}", json={"provisioned": {"device": 1}}).raise_for_status()
        return [_round(service, client, operator, copies, nodes) for _ in range(rounds)]


def _round(
    service: HttpService, client: httpx.Client, operator: httpx.Client, copies: int, nodes: int
) -> dict[str, float]:
    deadline = time.monotonic() + READY_S
    while len(places := _places(client)) < copies or _ready(operator) < nodes:
        assert time.monotonic() < deadline, "the copies never came"
        time.sleep(0.2)
    lost = max(set(places.values()), key=list(places.values()).count)
    sizes = {name: size for name, (size, _) in _functions(client).items()}
    missing = {name for name, node in places.items() if node == lost}
    os.kill(_supervisor(service, lost), signal.SIGKILL)
    begin = time.monotonic()
    back: dict[str, tuple[float, str]] = {}
    while missing - set(back):
        assert time.monotonic() < begin + BACK_S, "copies are missing still"
        time.sleep(LOOK_S)
        now = time.monotonic() - begin
        for name, node in _places(client).items():
            if name in missing and node != lost:
                back.setdefault(name, (now, node))
    times = [at for at, _ in back.values()]
    return {
        "lost": len(missing),
        "first_s": round(min(times), 3),
        "all_s": round(max(times), 3),
        "link_share": _link_share(back, sizes),
    }


def leaders(model: Path, rounds: int, root: Path) -> list[dict[str, float]]:
    """Returns a row for each kill."""
    with redis_server(root) as redis:
        gateway = f"workers: {GATEWAY_WORKERS}, redis: '{redis.url}'"
        with HttpService(model, [], root / "service", "float32", 1, gateway=gateway) as service:
            return [{"leader_s": _replaced(service)} for _ in range(rounds)]


def _replaced(service: HttpService) -> float:
    deadline = time.monotonic() + READY_S
    while len(children(service.pid)["worker"]) < GATEWAY_WORKERS or not (led := leader(service)):
        assert time.monotonic() < deadline, "no worker leads"
        time.sleep(0.2)
    os.kill(led[0], signal.SIGKILL)
    begin = time.monotonic()
    while not set(leader(service)) - set(led):
        assert time.monotonic() < begin + BACK_S, "the leader was not replaced"
        time.sleep(LOOK_S)
    return round(time.monotonic() - begin, 3)


def _link_share(back: dict[str, tuple[float, str]], sizes: dict[str, int]) -> float:
    by_node: dict[str, list[tuple[float, int]]] = {}
    for name, (at, node) in back.items():
        by_node.setdefault(node, []).append((at, sizes[name]))
    arrived = sorted(max(by_node.values(), key=lambda each: sum(size for _, size in each)))
    seconds = arrived[-1][0] - arrived[0][0]
    return round(sum(size for _, size in arrived[1:]) / seconds / STORE, 3) if seconds > 10 * LOOK_S else 0.0


def _functions(client: httpx.Client) -> dict[str, tuple[int, list[dict[str, Any]]]]:
    """Returns each function's bytes, and where it is."""
    listed = client.get("/functions", params={"limit": 1000}).raise_for_status().json()["functions"]
    return {each["name"]: (each["bytes"], each["residency"]) for each in listed}


def _places(client: httpx.Client) -> Places:
    return {
        name: place["node"]
        for name, (_, residency) in _functions(client).items()
        for place in residency
        if place["tier"] == "device"
    }


def _ready(operator: httpx.Client) -> int:
    nodes = operator.get("/nodes").raise_for_status().json()["nodes"]
    return sum(node["record"]["state"] == "ready" for node in nodes)


def _supervisor(service: HttpService, node: str) -> int:
    """Returns the id of the process whose log is the node's."""
    (supervisor,) = (
        pid for pid in children(service.pid)["node"] if os.readlink(f"/proc/{pid}/fd/2").endswith(f"/{node}.log")
    )
    return supervisor


def main() -> None:
    parser = arguments(__doc__ or "", STORIES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds, counts, nodes = (1, QUICK_COPIES, QUICK_NODES) if options.quick else (options.rounds, COPIES, NODES)
    rows: list[dict[str, Any]] = []
    for copies in counts:
        with tempfile.TemporaryDirectory() as root:
            rows += [{"copies": copies, **row} for row in measure(options.model, copies, rounds, nodes, Path(root))]
    with tempfile.TemporaryDirectory() as root:
        replaced = leaders(options.model, rounds, Path(root))
    times = [row["leader_s"] for row in replaced]
    figures: dict[str, float] = {"leader_s": median(times), "worst_leader_s": max(times)}
    for copies in counts:
        of_count = [row for row in rows if row["copies"] == copies]
        figures |= {
            f"all_s_{copies}": median(row["all_s"] for row in of_count),
            f"worst_s_{copies}": max(row["all_s"] for row in of_count),
            f"link_share_{copies}": median(row["link_share"] for row in of_count),
        }
    settings = {
        "nodes": nodes, "gateway_workers": GATEWAY_WORKERS, "rounds": rounds, "store": STORE, "rank": RANK,
        "model": options.model.name,
    }  # fmt: skip
    publish(report("restored", settings, options.seed, [*rows, *replaced], figures, simulated=True), options.json)


if __name__ == "__main__":
    main()
