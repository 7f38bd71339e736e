"""One tenant takes of each shared pool what it can get: another tenant's work on the same pool still ends in time.

Each pool of gateway.places.pools has a case here, and a row in docs/operate/security.md. GARNISH_POOL_MINUTES makes the
drawn run at the end longer, as `make chaos` does.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_gateway import Running, start_gateway, upload
from stub_node import StubNode, echo

from cluster.messages import Event, GenerateRequest
from gateway.calls import chat_templates
from gateway.catalog.threads import LeavableThreads
from gateway.config import GatewayConfig
from gateway.events import webhooks
from gateway.places.places import Places, Pool, working_for
from gateway.places.pools import pools_of
from gateway.residency import orders

PAGE = Path(__file__).parents[3] / "docs/operate/security.md"
MINUTES = float(os.environ.get("GARNISH_POOL_MINUTES", "0"))
EXPIRY_S = 600.0 + 60 * MINUTES
"""Seconds for which the stub node, which reports once, counts as there."""
BOUND_S = 20.0
"""Within which the other tenant's work has to end, if the host has a core for it. Each attack would hold it up for
longer."""
PATHS = dict.fromkeys(("model_dir", "base_id", "registry", "secret_file", "tmp_dir"), "")
POOLS = {**pools_of(GatewayConfig(**PATHS)), "node_orders": orders.POOL}  # type: ignore[arg-type]
LOOP = (
    "{% if messages[-1].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}ok"
)
ENDLESS_PATTERN = r"(.*)*(.*)*(.*)*X"


@dataclass
class World:
    """A gateway with functions of both tenants, and a receiver that takes connections and never answers."""

    running: Running
    adapter: Path
    hanging_url: str
    good_url: str
    delivered: threading.Event
    released: threading.Event
    """Set when the node lets the attacker's calls end."""
    names: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    def client(self, role: str) -> httpx.Client:
        return self.running.client(role)

    def invoke(self, role: str, **fields: Any) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 1, "background": True, **fields}
        return self.client(role).post("/invoke/f", json=body)

    def until_delivered(self, **fields: Any) -> None:
        id = self.invoke("other", **fields).raise_for_status().json()["id"]
        self.until(lambda: (self.event(id).get("delivery") or {}).get("state") == "delivered")

    def event(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client("other").get(f"/invocations/{id}").raise_for_status().json()
        return found

    def in_use(self, pool: str) -> float:
        text = self.client("admin").get("/metrics").raise_for_status().text
        [found] = re.findall(rf'^garnish_pool_in_use{{pool="{pool}"}} (\S+)$', text, re.MULTILINE)
        return float(found)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline()
        while not condition():
            assert not deadline.is_over(), "another tenant holds it up"
            time.sleep(0.02)


class Deadline:
    """The end of BOUND_S from now, and later on a host that gives this thread only a part of a core.

    The share is measured at the start, and again when the time seems over, because a host may become busy meanwhile."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.seconds = BOUND_S * self._slowdown()

    def is_over(self) -> bool:
        if time.monotonic() - self.start < self.seconds:
            return False
        elapsed = time.monotonic() - self.start
        self.seconds = max(self.seconds, BOUND_S * self._slowdown())
        return elapsed >= self.seconds

    @staticmethod
    def _slowdown() -> float:
        start, cpu = time.monotonic(), time.thread_time()
        while time.thread_time() - cpu < 0.1:
            pass
        return max(1.0, (time.monotonic() - start) / 0.1)


Attack = Callable[[World, int], None]
Work = Callable[[World], None]


@pytest.fixture(scope="module")
def world(
    stories_dir: Path, stories_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    patch = pytest.MonkeyPatch()
    patch.setattr(webhooks, "SEND_S", 600.0)  # so that whoever waits for the attacker's is seen
    patch.setattr(chat_templates, "RENDER_SECONDS", 2.0)
    patch.setattr("adapters.inspector.MATCH_SECONDS", 1.0)
    patch.setattr("gateway.events.worker.STOP_S", 0.5)
    with ExitStack() as stack:
        stack.callback(patch.undo)
        released, delivered = threading.Event(), threading.Event()
        hanging, good = stack.enter_context(receiver(None)), stack.enter_context(receiver(delivered))
        running = start_gateway(
            stack, stories_dir, tmp_path_factory.mktemp("pools"), webhook_hosts=("127.0.0.0/8", "localhost"),
            record_expiry=EXPIRY_S, node_silence=EXPIRY_S,
        )  # fmt: skip

        async def script(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
            if asked.tenant == "acme" and len(asked.token_ids) > 20:
                while not released.is_set():  # noqa: ASYNC110 - another thread sets it
                    await asyncio.sleep(0.05)
            async for item in echo(node, asked):
                yield item

        running.node(script, queue_limit=4096)
        stack.callback(released.set)
        made = World(running, stories_adapters["pirate"], hanging, good, delivered, released)
        for role in ("acme", "other"):
            client = made.client(role)
            assert client.post("/deploy/f", files=upload(made.adapter)).status_code == 201
            policy = {"defaults": {"chat_template": LOOP}}
            assert client.patch("/functions/f", json=policy).status_code == 200
            made.client("admin").post(f"/tenants/{role}/webhook-secrets").raise_for_status()
        yield made


@contextmanager
def receiver(delivered: threading.Event | None) -> Iterator[str]:
    """Yields the URL of a server that answers 204 and sets `delivered`, or never answers where it is None."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if delivered is not None:
                    connection.recv(1 << 20)
                    connection.sendall(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
                    delivered.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/hook"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        for connection in kept:
            connection.close()


# --- what the attacker does, N times at once; each returns once the pool is taken


def in_background(world: World, count: int, call: Callable[[httpx.Client], object]) -> None:
    """Starts `count` calls of the attacker, whose outcomes do not matter."""
    clients = [world.client("acme") for _ in range(count)]

    def run(client: httpx.Client) -> None:
        with suppress(httpx.HTTPError, RuntimeError):  # the test has ended
            call(client)

    for client in clients:
        threading.Thread(target=run, args=(client,), daemon=True).start()


def open_uploads(path: str) -> Attack:
    def attack(world: World, count: int) -> None:
        host, port = world.running.url.removeprefix("http://").split(":")
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {world.running.keys['acme']}\r\n"
            "content-type: multipart/form-data; boundary=b\r\ncontent-length: 100000\r\nexpect: 100-continue\r\n\r\n"
        )
        for _ in range(count):
            raw = world.running.stack.enter_context(socket.create_connection((host, int(port))))
            raw.sendall(head.encode())
            assert raw.recv(12) in (b"HTTP/1.1 100", b"HTTP/1.1 429")

    return attack


def endless_deploys(world: World, count: int) -> None:
    files = upload(world.adapter)
    name, config = files["adapter_config.json"]
    changed = json.dumps({**json.loads(config), "target_modules": ENDLESS_PATTERN}).encode()
    body = {**files, "adapter_config.json": (name, changed)}
    in_background(world, count, lambda client: client.post("/deploy/g?dry_run=true", files=body))


def long_texts(world: World, count: int) -> None:
    body = {"prompt": "Once upon a time. " * 50_000}
    in_background(world, count, lambda client: client.post("/tokenize", json=body))


def looping_templates(world: World, count: int) -> None:
    body = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 1}
    in_background(world, count, lambda client: client.post("/invoke/f", json=body))


def evil_forms(world: World, count: int) -> None:
    """Each is another one, since a form whose check was killed is not tried again. A few hold the place long enough."""

    def call(client: httpx.Client) -> None:
        parts = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"]
        form = {"json": {"title": f"{next(world.names)}", "allOf": parts}}
        client.post("/invoke/f", json={"prompt": "x", "structured_outputs": form})

    in_background(world, min(count, 5), call)


def hanging_webhooks(world: World, count: int) -> None:
    for _ in range(count):
        world.invoke("acme", on_success={"webhook": world.hanging_url}).raise_for_status()


def many_destinations(world: World, count: int) -> None:
    for _ in range(count):
        world.invoke("acme", on_success={"function": "f"}).raise_for_status()


def long_runs(world: World, count: int) -> None:
    for _ in range(count + 8):
        world.invoke("acme", prompt="Once upon a time there was a long call " * 8).raise_for_status()


# --- what the other tenant does meanwhile


def deploys(world: World) -> None:
    reply = world.client("other").post("/deploy/g", files=upload(world.adapter))
    assert reply.status_code in (200, 201), reply.text


def uploads_a_file(world: World) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "f", "prompt": "x"}}
    files = {"file": ("calls.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    assert world.client("other").post("/v1/files", files=files).status_code == 200


def tokenises(world: World) -> None:
    assert world.client("other").post("/tokenize", json={"prompt": "Once upon a time " * 500}).status_code == 200


def renders(world: World) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    assert world.client("other").post("/invoke/f", json=body).status_code == 200


def states_a_form(world: World) -> None:
    body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": [f"a{next(world.names)}"]}}
    assert world.client("other").post("/invoke/f", json=body).status_code == 200


def is_told(world: World) -> None:
    world.delivered.clear()
    world.until_delivered(on_success={"webhook": world.good_url})
    assert world.delivered.is_set()


def is_told_by_name(world: World) -> None:
    world.until_delivered(on_success={"webhook": world.good_url.replace("127.0.0.1", "localhost")})


def calls_a_function(world: World) -> None:
    world.until_delivered(on_success={"function": "f"})


def runs(world: World) -> None:
    id = world.invoke("other").raise_for_status().json()["id"]
    world.until(lambda: world.event(id)["state"] == "succeeded")


BY_CALLS: dict[str, tuple[Attack, Work]] = {
    "deploy_checks": (endless_deploys, deploys),  # before uploads hold the attacker's places for deploys
    "deploys": (open_uploads("/deploy/h"), deploys),
    "batch_files": (open_uploads("/v1/files"), uploads_a_file),
    "texts": (long_texts, tokenises),
    "templates": (looping_templates, renders),
    "forms": (evil_forms, states_a_form),
    "webhooks": (hanging_webhooks, is_told),
    "destinations": (many_destinations, calls_a_function),
    "event_runs": (long_runs, runs),
}
"""Pools that calls of a gateway fill."""
FLEETING = ("texts", "destinations")
"""Of them those whose work may have ended before the pool is looked at."""
BY_THREADS = (
    "webhook_names", "sources", "rebuilds", "store_reads", "store_writes", "event_reads", "event_writes", "batch_store",
)  # fmt: skip
"""Pools of threads, which hang as long as the store, the source or the name server."""
ELSEWHERE = {
    "node_orders": "tests/gateway/residency/test_residency_orders.py",
    "requests": "tests/gateway/http/test_open_requests.py",
    "large_bodies": "tests/gateway/http/test_open_requests.py",
}


def test_each_pool_has_a_case() -> None:
    assert {*BY_CALLS, *BY_THREADS, *ELSEWHERE} == set(POOLS)


def test_the_page_on_security_lists_each_pool() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (\d+) \| (\d+) \| [^|]* \|$", PAGE.read_text(), re.MULTILINE)
    assert {name: (int(size), int(part)) for name, size, part in rows} == {
        name: (pool.size, pool.per_tenant) for name, pool in POOLS.items()
    }


@pytest.mark.parametrize("pool", POOLS.values(), ids=lambda pool: pool.name)
def test_a_tenant_may_hold_a_part_of_each_pool(pool: Pool) -> None:
    """A quarter where the tenant decides how long it holds a place, and never the last one. Three quarters of the
    open requests and of those with large bodies, which may all be one tenant's."""
    is_large = pool.name.endswith(("_reads", "_writes", "_store")) or pool.name in ("requests", "large_bodies")
    assert pool.per_tenant <= (0.75 if is_large else 0.25) * pool.size


@pytest.mark.parametrize("workers", [1, 3, 32])
def test_each_worker_has_places_for_two_tenants(workers: int) -> None:
    config = GatewayConfig(**PATHS, workers=workers, max_uploads=4, max_tenant_uploads=4)  # type: ignore[arg-type]
    assert all(pool.size > pool.per_tenant for pool in pools_of(config).values())


@pytest.mark.parametrize("name", BY_THREADS)
def test_hanging_threads_of_one_tenant_leave_places_to_others(name: str) -> None:
    answer = threading.Event()

    async def main() -> None:
        pool = POOLS[name]
        threads = LeavableThreads(Places(pool))
        with working_for("bad"):
            held = [asyncio.ensure_future(threads.run(lambda: answer.wait(60))) for _ in range(4 * pool.size)]
        await asyncio.sleep(0)
        with working_for("good"):
            async with asyncio.timeout(BOUND_S):
                assert await threads.run(lambda: 1) == 1
        assert threads.places.in_use == pool.per_tenant
        answer.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*held, return_exceptions=True)

    try:
        asyncio.run(main())
    finally:
        answer.set()


@pytest.mark.parametrize("name", BY_CALLS)
def test_one_tenant_takes_all_it_gets(world: World, name: str) -> None:
    attack, work = BY_CALLS[name]
    attack(world, POOLS[name].per_tenant + 16)
    if name not in FLEETING:
        world.until(lambda: world.in_use(name) >= POOLS[name].per_tenant)
    deadline = Deadline()
    work(world)
    assert not deadline.is_over()


@pytest.mark.parametrize("seed", [0])
def test_drawn_attacks_on_several_pools_at_once(world: World, seed: int) -> None:
    """What the earlier attacks hold is still held: then all works of the other tenant end in time, in drawn order."""
    rng, end = random.Random(seed), time.monotonic() + 60 * MINUTES
    while True:
        for name in rng.sample(sorted(BY_CALLS), 3):
            BY_CALLS[name][0](world, rng.randint(1, 8))
        for name in rng.sample(sorted(BY_CALLS), len(BY_CALLS)):
            deadline = Deadline()
            BY_CALLS[name][1](world)
            assert not deadline.is_over(), name
        is_told_by_name(world)
        if time.monotonic() >= end:
            break
