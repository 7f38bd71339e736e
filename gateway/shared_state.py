"""State shared by the gateway's workers: in memory if there is one worker, else in Redis."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from cluster.leases import Leases, MemoryLeases, RedisLeases
from cluster.limits import LimitState, MemoryLimits
from cluster.redis_limits import RedisLimits
from cluster.redis_link import RedisLink, prefix_of
from cluster.redis_state import RedisClusterState
from cluster.state import ClusterState, MemoryClusterState
from gateway.config import GatewayConfig
from gateway.events.events import EventQueued
from gateway.events.events import make_channel as make_event_channel
from gateway.residency.reports import Message, make_channel
from gateway.workers.channel import Channel
from gateway.workers.peers import Peers

START_SECONDS = 60.0
"""Maximum seconds for which a starting worker waits for Redis before it takes calls. Without Redis it would know no
nodes."""

log = logging.getLogger("gateway")


@dataclass(frozen=True)
class Shared:
    cluster: ClusterState
    limits: LimitState
    leases: Leases
    peers: Peers
    residency: Channel[Message]
    events: Channel[EventQueued]
    link: RedisLink | None


@asynccontextmanager
async def open_shared(config: GatewayConfig, secret: str) -> AsyncIterator[Shared]:
    if config.redis is None:
        cluster = MemoryClusterState(monotonic, expiry=config.record_expiry)
        yield _shared(cluster, MemoryLimits(monotonic), MemoryLeases(monotonic), None)
        return
    worker = f"{os.getpid()}-{secrets.token_hex(4)}"
    link = RedisLink(config.redis, prefix_of(secret), worker, monotonic)
    mirror = RedisClusterState(link, expiry=config.record_expiry)
    shared = _shared(mirror, RedisLimits(link, config.workers), RedisLeases(link), link)
    async with link.running(), shared.peers.running(), shared.events.running():
        if not await link.wait_until_up(START_SECONDS):
            log.error("Redis is still unavailable: this worker starts without any nodes")
        yield shared


def _shared(cluster: ClusterState, limits: LimitState, leases: Leases, link: RedisLink | None) -> Shared:
    return Shared(cluster, limits, leases, Peers(link), make_channel(link), make_event_channel(link), link)
