"""Checks of a service after the last harm."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.http_service import HttpService
from cluster.redis_link import WORKER_SECONDS
from tests.support.redis_server import RedisServer

REST_SECONDS = 60.0
USAGE_SECONDS = 30.0
"""A worker writes its usage to the registry every ten seconds; a killed one's is taken over by the next."""
MODULES = {"engine": "node_agent.engine_process", "api": "node_agent.api", "node": "garnish.run_node"}
GATEWAY = "garnish.run_gateway"


def children(root: int) -> dict[str, list[int]]:
    """Process ids below `garnish up` by kind: engine, api, node (their supervisor), worker, gateway (their master)."""
    parents, commands = _processes()
    below = [root]
    for pid in below:
        below += [child for child, parent in parents.items() if parent == pid]
    by_kind: dict[str, list[int]] = {kind: [] for kind in (*MODULES, "worker", "gateway")}
    for pid in below:
        words = commands[pid].split("\0")
        for kind, module in MODULES.items():
            if module in words:
                by_kind[kind].append(pid)
        if GATEWAY in words:  # workers are its forks
            by_kind["gateway" if parents[pid] == root else "worker"].append(pid)
    return by_kind


def _processes() -> tuple[dict[int, int], dict[int, str]]:
    """Parents and command lines of all living processes."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)], commands[int(entry.name)] = int(parent), command
    return parents, commands


def at_rest(service: HttpService, redis: RedisServer, prefix: str) -> dict[str, int]:
    """Returns what is still held REST_SECONDS after the last call; {} as soon as nothing is."""
    deadline = time.monotonic() + REST_SECONDS
    with service.client(admin=True) as client:
        while True:
            still_held = _still_held(client, redis, prefix)
            if not still_held or time.monotonic() > deadline:
                return still_held
            time.sleep(0.2)


def _still_held(client: httpx.Client, redis: RedisServer, prefix: str) -> dict[str, int]:
    try:
        nodes = client.get("/nodes").raise_for_status().json()["nodes"]
        metrics = client.get("/metrics").raise_for_status().text.splitlines()
    except httpx.HTTPError:
        return {"gateway": 1}
    counts = {"absent nodes": 2 - sum(node["record"]["state"] == "ready" for node in nodes)}
    for node in nodes:
        record: dict[str, Any] = node["record"]
        leases = sum(entry["in_use"] for entry in record.get("residents", []))
        blocks = record["kv_blocks"] - record["kv_blocks_free"]
        of_node = {"running": record["running"], "queued": record["queued"], "reserved": node["reserved"]}
        counts |= {
            f"{record['id']} {name}": count for name, count in (of_node | {"leases": leases, "blocks": blocks}).items()
        }
    open_calls = next((line.split()[1] for line in metrics if line.startswith("garnish_open_invocations ")), "0")
    counts["open invocations"] = int(float(open_calls))
    with redis.client as shared:
        counts["places in Redis"] = _places(shared, prefix)
        counts["reservations in Redis"] = sum(1 for _ in shared.scan_iter(f"{prefix}ends:*"))
    return {name: count for name, count in counts.items() if count}


def _places(shared: Any, prefix: str) -> int:
    """Returns the places of gateway workers that live.

    Places of a worker that died count for nothing. They are removed at the next call of their owner, or after two hours
    (cluster/redis_limits.py).
    """
    seconds, _ = shared.time()
    beats = shared.zrange(f"{prefix}workers", 0, -1, withscores=True)
    alive = {worker for worker, beat in beats if seconds - beat / 1000 < WORKER_SECONDS}
    keys = shared.scan_iter(f"{prefix}places:*")
    return sum(int(count) for key in keys for worker, count in shared.hgetall(key).items() if worker in alive)


def leader(service: HttpService) -> list[int]:
    """The process id of the gateway worker that leads; empty while none says so."""
    try:
        with service.client(admin=True, timeout=10) as client:
            text = client.get("/metrics").raise_for_status().text
    except httpx.HTTPError:
        return []
    lines = [line for line in text.splitlines() if line.startswith("garnish_leader{") and line.endswith(" 1.0")]
    pids = [int(line.split("-")[-2]) for line in lines]  # host, process id and a random number
    return [pid for pid in pids if pid in children(service.pid)["worker"]]


def lost(service: HttpService, deployed: Mapping[str, str], functions: Sequence[str], done: int) -> dict[str, int]:
    """Returns what was acknowledged and is not there. `done`: requests of `functions`."""
    with service.client() as client:
        missing = {"deploys": 0, "requests in the metering": 0}
        for name, digest in deployed.items():
            reply = client.get(f"/functions/{name}/versions")
            versions = reply.json()["versions"] if reply.status_code == 200 else []
            missing["deploys"] += digest not in [version["digest"] for version in versions]
        deadline = time.monotonic() + USAGE_SECONDS
        while True:
            rows = client.get("/usage", params={"group_by": "function"}).raise_for_status().json()["rows"]
            counted = sum(row["requests"] for row in rows if row["function"] in functions)
            missing["requests in the metering"] = max(0, done - counted)
            if counted >= done or time.monotonic() > deadline:
                return missing
            time.sleep(0.5)
