"""What functions in use cost the store: real gateway workers and Redis, and moto's S3 behind a proxy that counts."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
from settled import settle
from stub_node import echo, stub_node
from test_gateway_server import config, node_of, process, wait_for  # noqa: F401  (config is a fixture)
from test_gateway_workers import Pair

from adapters.base_model import load_base_model
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.tenants import Tenants
from gateway.config import GatewayConfig
from tests.support.many_functions import TENANT, fill
from tests.support.redis_server import redis_server
from tests.support.s3_proxy import Proxy

FUNCTIONS = 100
REGISTRY = "s3://garnish-tests/store-reads"
WORKERS = 2
CALLERS = 4
WINDOW_S, ROUNDS = 6.0, 3
"""Minimum seconds of a round, which is longer than the pause between two polls of the queues. If the host delays a read
of the epoch, names are read, so one round without that is enough."""


def test_functions_in_use_cost_two_workers_less_than_five_reads_per_second(
    config: GatewayConfig,  # noqa: F811
    s3_endpoint: str,
    stories_adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first call of each on: nothing is read again, but for the epoch."""
    store = open_store(REGISTRY)
    Tenants(store).put(TENANT)
    key = Tenants(store).add_key(TENANT)[0]
    base = load_base_model(Path(config.model_dir), config.base_id)
    fill(Registry(store, base), stories_adapters["pirate"], FUNCTIONS, 0)
    settle(store)
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(s3_endpoint))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        redis = stack.enter_context(redis_server(tmp_path))
        changed = msgspec.structs.replace(config, registry=REGISTRY, auth="keys", workers=WORKERS, redis=redis.url)
        url = f"http://127.0.0.1:{config.port}"
        child = stack.enter_context(process(changed, tmp_path / "log"))
        node = stack.enter_context(stub_node(node_of(changed, echo)))
        wait_for(url, "/healthz", child)
        pair = Pair(changed, url, child, redis, node)
        pair.until(lambda: len(pair.workers) == WORKERS)
        clients = [[stack.enter_context(pair.client(worker)) for _ in range(CALLERS)] for worker in pair.workers]
        for client in (each for group in clients for each in group):
            client.headers["authorization"] = f"Bearer {key}"
        pair.publish()
        pair.until(lambda: all(group[0].get("/readyz").status_code == 200 for group in clients))
        with ThreadPoolExecutor(WORKERS * CALLERS) as pool:
            list(pool.map(_call_all, *_work(clients)))
            for _ in range(ROUNDS):
                before, began = len(proxy.requests), time.monotonic()
                while (seconds := time.monotonic() - began) < WINDOW_S:
                    list(pool.map(_call_all, *_work(clients)))
                reads = [each for each in proxy.requests[before:] if each.split()[0] in ("GET", "HEAD")]
                if len(reads) / seconds < 5:
                    break
            else:
                pytest.fail(f"{len(reads) / seconds:.1f} reads per second: {Counter(reads).most_common(5)}")


def _work(clients: list[list[httpx.Client]]) -> tuple[list[httpx.Client], list[range]]:
    """For each client, which functions it calls: each worker is asked for all."""
    shares = [range(number, FUNCTIONS, CALLERS) for number in range(CALLERS)]
    return [client for group in clients for client in group], shares * len(clients)


def _call_all(client: httpx.Client, numbers: range) -> None:
    for number in numbers:
        _call(client, f"/invoke/f{number:05d}").raise_for_status()


def _call(client: httpx.Client, path: str) -> httpx.Response:
    """Once more on another connection, if this one ends at that moment, as a kept one may."""
    body = {"prompt": "x", "max_tokens": 1}
    try:
        return client.post(path, json=body)
    except httpx.RemoteProtocolError:
        return client.post(path, json=body)
