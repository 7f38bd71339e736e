"""Time of routing a request in the gateway, by the number of nodes.

`scoring` is one choice of a policy among all nodes; `place` is all of it over the cluster state in memory: eligible
nodes, the choice, the reservation, and the record for `garnish explain`. Between two placements places are given back
and nodes publish their records, whose own time is `publish`. Nodes have drawn batches and resident adapters, and
requests ask for drawn adapters, some of them called often. One process, one thread. `reserved` is `place` over the
state in a Redis on the same host.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.common.report import ContentionProbe, arguments, publish, report
from cluster.news import ABSENT_TIER, Changes, NodeRecord, NodeReport, Resident, full_report, heartbeat_from, rank_sums
from cluster.node_table import ASSUMED, Demand
from cluster.redis_link import RedisLink
from cluster.redis_state import RedisClusterState
from cluster.state import ClusterState, MemoryClusterState
from gateway.scheduling.policy import POLICIES, make_policy
from gateway.scheduling.request import RoutingRequest
from gateway.scheduling.route import Trace, eligible_nodes, reserve_route
from tests.support.redis_server import redis_server

RANKS = (8, 16, 32, 64)
ADAPTERS = 40_000
RESIDENT = 200
CHANGED = 3
"""Adapters that changed since the node's record before."""
OPEN = 500


@dataclass
class Node:
    """The last record that a node published, and its residents."""

    record: NodeRecord
    residents: list[Resident]


def next_news(draw: random.Random, index: int, before: Node | None = None) -> tuple[Node, NodeReport]:
    """Another batch, and a few adapters that came or went."""
    record = next_record(draw, index, before.record if before else None)
    count, tiers = CHANGED if before else RESIDENT, ("device", "host", "disk")
    added = [Resident(digest(draw), draw.choice(tiers), 10**7, draw.randrange(2)) for _ in range(count)]
    if before is None:
        return Node(record, added), full_report(record, added, record.seq)
    removed = [Resident(resident.digest, ABSENT_TIER, 0, 0) for resident in before.residents[:count]]
    changes = Changes(before.record.seq, record.seq, [*removed, *added])
    return Node(record, before.residents[count:] + added), NodeReport(heartbeat_from(record), None, changes)


def next_record(draw: random.Random, index: int, before: NodeRecord | None) -> NodeRecord:
    running = draw.randrange(24)
    drawn = msgspec.structs.replace(ASSUMED, exposed_share=draw.uniform(0.1, 1.0))
    return NodeRecord(
        id=f"node-{index:04d}",
        epoch="1",
        seq=before.seq + 1 if before else 1,
        url="http://127.0.0.1:1",
        state="ready",
        base="b",
        base_id="b",
        max_context=8192,
        running=running,
        queued=draw.randrange(3),
        queue_limit=4096,
        kv_blocks_free=4000,
        kv_blocks=8000,
        block_tokens=16,
        max_rows=32,
        **rank_sums([(slot, draw.choice(RANKS)) for slot in range(running)], []),
        contexts=sum(draw.randrange(2000) for _ in range(running)),
        tightest_tpot=0.06,
        performance=before.performance if before else drawn,
        prompt_tokens_left=draw.randrange(500),
    )


def digest(draw: random.Random) -> str:
    """A few are called much more often than the others."""
    return f"{int(ADAPTERS * draw.random() ** 4):064x}"


def request(draw: random.Random, number: int) -> RoutingRequest:
    prompt_tokens, adapter, rank = draw.randrange(1, 1000), digest(draw), draw.choice(RANKS)
    return RoutingRequest(
        id=f"inv_{number}-0",
        demand=Demand(rank, prompt_tokens, max_tokens=256, tpot=0.06),
        digest=adapter,
        adapter_bytes=10**7,
        expected_tokens=draw.uniform(10, 250),
        typical_tokens=100.0,
        ttft=5.0,
    )


async def measure_shared(policy: str, nodes: int, count: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root, redis_server(Path(root)) as server:
        link = RedisLink(server.url, "placement:", "one", time.monotonic)
        state = RedisClusterState(link, expiry=1e9)
        async with link.running():
            if not await link.wait_until_up(10):
                raise RuntimeError("Redis did not answer")
            return await measure(policy, nodes, count, seed, state) | {"state": "redis"}


async def measure(policy: str, nodes: int, count: int, seed: int, state: ClusterState | None = None) -> dict[str, Any]:
    draw = random.Random(seed)
    state, chooser = state or MemoryClusterState(time.monotonic, expiry=1e9), make_policy(policy)
    nodes_sent = []
    for index in range(nodes):
        node, news = next_news(draw, index)
        nodes_sent.append(node)
        await state.publish(news)
    scoring, placing, publishing = [], [], []
    open_ones: deque[tuple[str, str]] = deque()
    for number in range(count):
        call = request(draw, number)
        table = await state.table()
        candidates = eligible_nodes(table, "b", call, frozenset())
        begin = time.perf_counter()
        chooser.choose(table, candidates, call)
        scoring.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        route = await reserve_route(state, chooser, "b", call, trace=Trace())
        placing.append(time.perf_counter() - begin)
        open_ones.append((route.node_id, call.id))
        while len(open_ones) > OPEN:
            await state.release(*open_ones.popleft())
        if number % 4 == 0:
            index = draw.randrange(nodes)
            nodes_sent[index], news = next_news(draw, index, nodes_sent[index])
            begin = time.perf_counter()
            await state.publish(news)
            publishing.append(time.perf_counter() - begin)
    measured = {"scoring": scoring, "place": placing, "publish": publishing}
    return {"policy": policy, "nodes": nodes} | {
        f"{name}_{label}_us": value for name, times in measured.items() for label, value in _percentiles(times).items()
    }


def _percentiles(times: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times[len(times) // 10 :], (50, 99)) * 1e6  # the first ones warm up
    return {"p50": float(p50), "p99": float(p99)}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    settings: dict[str, Any] = {"nodes": [60, 1000], "requests": 20_000, "adapters": ADAPTERS, "resident": RESIDENT}
    if options.quick:
        settings |= {"requests": 200}
    probe = ContentionProbe()
    rows = [
        asyncio.run(measure(policy, nodes, settings["requests"], options.seed))
        for nodes in settings["nodes"]
        for policy in POLICIES
    ]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        shared = runner.run(measure_shared("rank_aware", 60, settings["requests"], options.seed))
    rows.append(shared)
    settings |= probe.values()
    rank_aware_rows = [row for row in rows if row["policy"] == "rank_aware" and row is not shared]
    figures = {
        f"{name}_{label}_us_at_{row['nodes']}": row[f"{name}_{label}_us"]
        for row in rank_aware_rows
        for name in ("scoring", "place", "publish")
        for label in ("p50", "p99")
    }
    figures |= {f"reserved_{label}_us": shared[f"place_{label}_us"] for label in ("p50", "p99")}
    publish(report("placement", settings, options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
