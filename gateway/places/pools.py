"""Table of the pools that tenants share in one gateway worker. docs/operate/security.md shows it to operators."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.requests import Request

from gateway.config import GatewayConfig, share
from gateway.places.places import Places, Pool

FIXED_POOLS: tuple[Pool, ...] = (
    Pool(name="large_bodies", work="requests with large bodies", size=512, per_tenant=384),
    Pool(name="webhooks", work="webhooks", size=16, per_tenant=4),
    Pool(name="webhook_names", work="look-ups of webhooks' hosts", size=8, per_tenant=2),
    Pool(name="destinations", work="calls of destinations", size=16, per_tenant=4),
    Pool(name="event_runs", work="asynchronous calls", size=128, per_tenant=32),
    Pool(name="texts", work="long texts to tokenise", size=4, per_tenant=1),
    Pool(name="templates", work="conversations to render", size=4, per_tenant=1),
    Pool(name="forms", work="forms of answers to check", size=4, per_tenant=1),
    Pool(name="sources", work="copies of a `source`", size=8, per_tenant=2),
    Pool(name="rebuilds", work="rebuilds of adapters", size=4, per_tenant=1),
    Pool(name="store_reads", work="reads of the registry", size=16, per_tenant=12),
    Pool(name="store_writes", work="writes to the registry", size=8, per_tenant=6),
    Pool(name="event_reads", work="reads of asynchronous calls", size=16, per_tenant=12),
    Pool(name="event_writes", work="writes of asynchronous calls", size=8, per_tenant=6),
    Pool(name="batch_store", work="reads and writes of batches", size=8, per_tenant=6),
)


def pools_of(config: GatewayConfig) -> dict[str, Pool]:
    """Returns all pools of one worker by name."""
    uploads = _shares(config, config.max_uploads, config.max_tenant_uploads)
    stores = _shares(config, config.max_deploys, config.max_tenant_deploys)
    requests = share(config.max_concurrent, config)
    sized = (
        Pool(name="requests", work="requests", size=requests, per_tenant=max(1, requests * 3 // 4)),
        Pool(name="deploys", work="deploys", size=uploads[0], per_tenant=uploads[1]),
        Pool(name="batch_files", work="uploads of batch files", size=uploads[0], per_tenant=uploads[1]),
        Pool(name="deploy_checks", work="checks of adapters", size=stores[0], per_tenant=stores[1]),
    )
    return {pool.name: pool for pool in (*FIXED_POOLS, *sized)}


def hold_place(request: Request, pool: str, owner: str) -> None:
    """Takes a place of the worker's pool until the end of the reply. Raises ServiceError `overloaded` if the owner gets
    none at once."""
    places = cast(Pools, request.state.pools)[pool]
    cast(ExitStack, request.state.reserved).enter_context(places.hold_now(owner))


def _shares(config: GatewayConfig, size: int, per_tenant: int) -> tuple[int, int]:
    """Returns one worker's share of a limit for the whole gateway, and a tenant's part of it. At least one place stays
    free for other tenants."""
    here = max(2, share(size, config))
    return here, min(share(per_tenant, config), here - 1)


class Pools:
    """Places of all pools of one worker, with metrics in `registry`."""

    def __init__(self, config: GatewayConfig, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, labelnames=("pool",), registry=registry, multiprocess_mode="livesum")
        in_use = gauge("garnish_pool_in_use", "Places of a shared pool that are in use")
        waiting = gauge("garnish_pool_waiting", "Work that waits for a place of a shared pool")
        size = gauge("garnish_pool_places", "Places of a shared pool")
        about = "Work refused for want of a place in a shared pool"
        self._refused = Counter("garnish_pool_refused", about, ("pool",), registry=registry)
        pools = pools_of(config)
        self._gauges = {name: (in_use.labels(name), waiting.labels(name)) for name in pools}
        """Gauges of the places in use and of the waiting work, by pool."""
        self._places = {name: Places(pool, self._record) for name, pool in pools.items()}
        for name, places in self._places.items():
            size.labels(name).set(places.pool.size)
            self._refused.labels(name)
            self._record(places, False)

    def __getitem__(self, name: str) -> Places:
        return self._places[name]

    def _record(self, places: Places, refused: bool) -> None:
        name = places.pool.name
        in_use, waiting = self._gauges[name]
        in_use.set(places.in_use)
        waiting.set(places.waiting)
        if refused:
            self._refused.labels(name).inc()
