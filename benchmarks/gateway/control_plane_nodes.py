"""Many nodes without engines in one process: each has its API process's registry and publisher, and 2,000 adapters.

Run by path with PYTHONPATH set to the tree that is measured, so that it may be of another release: records are made and
published by that tree's own code. Which adapters come to the device and go is drawn by the weights of Azure's
functions. `--place` reckons the CPU time of placements instead, over the same registries and a state in memory.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from cluster.messages import ColdStart, Done, Event, GenerateRequest, Started, Timing, Token, encode_event
from cluster.node_table import Demand
from cluster.state import MemoryClusterState
from gateway.scheduling.policy import make_policy
from node_agent.config import EngineConfig, NodeConfig
from node_agent.ipc import Ready, Stats

try:
    from cluster.news import Resident
    from gateway.scheduling.request import RoutingRequest
    from gateway.scheduling.route import Trace, reserve_route
    from node_agent.api.publisher import Publisher
    from node_agent.api.request import Limits
    from node_agent.api.requests import RequestRegistry
except ImportError:  # of the earlier version
    from gateway.scheduling.placement import Trace  # type: ignore[import-not-found,no-redef]
    from gateway.scheduling.placement import place as reserve_route  # type: ignore[no-redef]
    from node_agent.api_desk import Desk as RequestRegistry  # type: ignore[import-not-found,no-redef]
    from node_agent.api_request import Limits  # type: ignore[import-not-found,no-redef]
    from node_agent.publisher import Publisher  # type: ignore[import-not-found,no-redef]

    from cluster.messages import Resident  # type: ignore[attr-defined,no-redef]
    from gateway.scheduling.request import PlacementRequest as RoutingRequest  # type: ignore[attr-defined,no-redef]

TELLS_CHANGES = hasattr(RequestRegistry, "news")
"""True for a release whose records are sums and changes. Types differ by release: registry and state are Any."""
ON_DEVICE = 64
SPARE = 1.2
"""Adapters that a node's callers ask for, for each that it holds."""
RUN_SECONDS = 0.2
TIMING = Timing(queue=0.0, prefill=0.0, total=0.0, cold_start=ColdStart("none", "none", 0.0, 0.0))


class NodesConfig(msgspec.Struct):
    gateway: str
    secret: str
    secret_file: str
    base: str
    base_id: str
    model_dir: str
    trace: str
    nodes: int
    residents: int
    calls_s: float
    """Drawn calls, of all nodes together, that move adapters."""
    placements: int = 0


class Node:
    def __init__(self, nodes_config: NodesConfig, number: int, weights: list[float]) -> None:
        self.draw = random.Random(number)
        count = round(nodes_config.residents * SPARE)
        self.population = [f"{number:04x}{index:060x}" for index in range(count)]
        self.weights = list(accumulate(self.draw.choices(weights, k=count)))
        self.host = OrderedDict.fromkeys(self.population[: nodes_config.residents])
        self.device = OrderedDict.fromkeys(self.population[:ON_DEVICE])
        self.used: dict[str, float] = {}
        self.residents: dict[str, Resident] = {}
        self._look_at(self.host)
        engine = EngineConfig(model_dir=nodes_config.model_dir, base_id=nodes_config.base_id, registry="registry")
        config = NodeConfig(
            node_id=f"node-{number:03}", gateway_url=nodes_config.gateway, secret_file=nodes_config.secret_file,
            run_dir="run", engine=engine,
        )  # fmt: skip
        self.registry: Any = RequestRegistry(config, Limits(49152, 8192))
        self.registry.engine_ready(Ready(nodes_config.base, "cpu", "float32", 8192, 4000, 16, 1 << 33, 32))
        self.publisher = Publisher(self.registry, nodes_config.gateway, nodes_config.secret)
        self.publish_stats()

    def call(self) -> None:
        """A drawn call: its adapter comes to the device, if need be through host memory."""
        (digest,) = self.draw.choices(self.population, cum_weights=self.weights)
        now, touched = time.monotonic(), [digest]
        for tier, capacity in ((self.host, len(self.host)), (self.device, ON_DEVICE)):
            tier[digest] = None
            tier.move_to_end(digest)
            if len(tier) > capacity:
                evicted, _ = tier.popitem(last=False)
                touched.append(evicted)
                if tier is self.host:
                    self.device.pop(evicted, None)
        ended = [name for name, end in self.used.items() if end <= now]
        for name in ended:
            del self.used[name]
        self.used[digest] = now + RUN_SECONDS
        self._look_at(touched + ended)
        self.publish_stats()

    def _look_at(self, digests: Iterable[str]) -> None:
        for digest in digests:
            if digest in self.host:
                tier = "device" if digest in self.device else "host"
                self.residents[digest] = Resident(digest, tier, 10_000_000, int(digest in self.used))
            else:
                self.residents.pop(digest, None)

    def publish_stats(self) -> None:
        """Publishes the next snapshot of the engine."""
        count = len(self.used)
        stats = Stats(
            running=count, queued=0, kv_blocks_free=4000 - 20 * count, adapter_bytes_free=1 << 30,
            batch_ranks=[16] * count, batch_contexts=[300] * count, residents=list(self.residents.values()),
            batch_slots=list(range(count)),
        )  # fmt: skip
        self.registry.engine_events([stats])

    def received(self, request: GenerateRequest) -> None:
        if TELLS_CHANGES:
            self.registry._received = self.registry._received.with_one(request.place)
        else:
            self.registry._acknowledged.append(request.id)
            self.registry.changed.set()

    async def generate(self, request: web.Request) -> web.Response:
        call = msgspec.msgpack.decode(await request.read(), type=GenerateRequest)
        self.received(call)
        events: tuple[Event, ...] = (
            Started(node="stub", cold_start="none"),
            Token(text="x", token_ids=[1], index=0),
            Done("length", len(call.token_ids), 1, 0, TIMING),
        )
        return web.Response(body=b"".join(encode_event(event) for event in events))


class Nodes:
    def __init__(self, nodes_config: NodesConfig) -> None:
        weights = trace_weights(Path(nodes_config.trace))
        self.nodes_config = nodes_config
        self.all = [Node(nodes_config, number, weights) for number in range(nodes_config.nodes)]
        self.moving = True

    async def serve(self) -> None:
        for node in self.all:
            node.registry.url = await _listen([web.post("/generate", node.generate)])
        control = await _listen([web.post("/pace", self.pace)])
        print(control, flush=True)
        async with asyncio.TaskGroup() as group:
            for index, node in enumerate(self.all):
                group.create_task(self._publish(node, index / len(self.all)))
            group.create_task(self._move())

    async def pace(self, request: web.Request) -> web.Response:
        """`moving`: adapters come and go; `interval`: seconds between two records."""
        pace: dict[str, Any] = await request.json()
        self.moving = bool(pace["moving"])
        for node in self.all:
            node.publisher._interval = float(pace["interval"])
        return web.Response()

    async def _publish(self, node: Node, share: float) -> None:
        await asyncio.sleep(0.2 * share)
        await node.publisher.run()

    async def _move(self) -> None:
        draw, next_at = random.Random(0), time.monotonic()
        while True:
            next_at += 1 / self.nodes_config.calls_s
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            if self.moving:
                draw.choice(self.all).call()


async def _listen(routes: list[web.RouteDef]) -> str:
    app = web.Application(client_max_size=1 << 24)
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


def trace_weights(file: Path) -> list[float]:
    """Invocations of each function over the trace."""
    with gzip.open(file, "rt") as lines:
        reader = csv.reader(lines)
        next(reader)
        sums = [float(sum(map(int, line[4:]))) for line in reader]
    return [count for count in sums if count]


async def placements(nodes_config: NodesConfig) -> dict[str, float]:
    """Milliseconds of CPU of one placement, between records that come at the rate of the nodes."""
    nodes = Nodes(nodes_config).all
    state: Any = MemoryClusterState(time.monotonic, expiry=1e9)
    policy = make_policy("rank_aware")
    last_sent = [-1] * len(nodes)

    async def publish(index: int) -> None:
        registry = nodes[index].registry
        if TELLS_CHANGES:
            news = registry.news(last_sent[index])
            assert await state.publish(news) == "taken"
            last_sent[index] = news.changes.at
        else:
            await state.publish(registry.record())

    for index, node in enumerate(nodes):
        node.registry.url = "http://127.0.0.1:1"
        await publish(index)
    draw, cpu_ms = random.Random(1), list[float]()
    for number in range(nodes_config.placements):
        for _ in range(3):  # 300 records a second beside 100 calls
            index = draw.randrange(len(nodes))
            nodes[index].call()
            await publish(index)
        digest = draw.choice(draw.choice(nodes).population)
        request = RoutingRequest(
            id=str(number), digest=digest, adapter_bytes=10_000_000, expected_tokens=50.0, **_size()
        )
        begin = time.thread_time()
        route = await reserve_route(state, policy, nodes_config.base, request, trace=Trace())
        cpu_ms.append(1e3 * (time.thread_time() - begin))
        await state.release(route.node_id, request.id)
    cpu_ms.sort()
    return {"p50_ms": cpu_ms[len(cpu_ms) // 2], "p99_ms": cpu_ms[int(0.99 * len(cpu_ms))], "most_ms": cpu_ms[-1]}


def _size() -> dict[str, Any]:
    """Returns how much the requests ask of a node; the earlier version has these fields in the request itself."""
    fields: dict[str, Any] = {"rank": 16, "prompt_tokens": 100, "max_tokens": 100}
    return {"demand": Demand(**fields)} if "demand" in RoutingRequest.__struct_fields__ else fields


def main() -> None:
    nodes_config = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodesConfig)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if nodes_config.placements:
            print(json.dumps(runner.run(placements(nodes_config))), flush=True)
        else:
            runner.run(Nodes(nodes_config).serve())


if __name__ == "__main__":
    main()
