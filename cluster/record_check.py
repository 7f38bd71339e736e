"""Checks of a node's report before the gateway uses it.

The cluster secret proves that the sender belongs to the cluster, not that its report is right. A broken node must not
spoil all routing. No node may have the gateway send prompts and the secret to another host. Performance models are
checked by cluster.model_check: an unusable one is ignored.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import msgspec

from cluster.limits import Bucket
from cluster.news import FULL_REPORT, NodeReport
from cluster.received import WINDOW

ID = re.compile(r"[\w.:-]{1,253}", re.ASCII)
POOL = re.compile(r"([a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?)?")
STATES = ("warming", "ready", "draining")
MAX_COUNT = 1 << 53
RECORDS_PER_SECOND = 60.0
"""Maximum reports per second of one node; a node normally sends 5."""
BURST_SECONDS = 2.0
MAX_RATES = 4096


class BadRecord(ValueError):
    """The report contradicts itself or its sender; the message names the field."""


def check_news(news: NodeReport, peer: str, allowed_hosts: Collection[str]) -> None:
    """Checks a node's report. `peer` is the IP address that the report came from. Raises BadRecord."""
    heartbeat, facts = news.heartbeat, news.facts
    _check_id(heartbeat.id)
    if not 0 < len(heartbeat.epoch) <= 200:
        raise BadRecord("epoch: expected 1 to 200 characters")
    if heartbeat.state not in STATES:
        raise BadRecord(f"state: expected one of {', '.join(STATES)}, found {heartbeat.state[:60]!r}")
    if len(heartbeat.received.bits) > WINDOW // 8:
        raise BadRecord(f"received: expected at most {WINDOW // 8} bytes")
    gpu, memory = (facts.gpu, facts.device_memory) if facts is not None else (None, None)
    parts: tuple[tuple[str, msgspec.Struct | None], ...] = (
        ("", heartbeat),
        ("strict.", heartbeat.strict),
        ("received.", heartbeat.received),
        ("gpu_load.", heartbeat.gpu_load),
        ("vllm.", heartbeat.vllm),
        ("", facts),
        ("gpu.", gpu),
        ("device_memory.", memory),
    )
    for owner, part in parts:
        for field, value in msgspec.structs.asdict(part).items() if part is not None else ():
            if isinstance(value, int) and not 0 <= value <= MAX_COUNT:
                raise BadRecord(f"{owner}{field}: {value} is below 0 or above 2^53")
    for owner, promise in (("", heartbeat), ("strict.", heartbeat.strict)):
        tpot = promise.tightest_tpot if promise is not None else None
        if tpot is not None and not 0 < tpot < math.inf:
            raise BadRecord(f"{owner}tightest_tpot: {tpot} is not a time")
    if (
        not (news.changes.since == FULL_REPORT or 0 <= news.changes.since <= news.changes.at)
        or news.changes.at > MAX_COUNT
    ):
        raise BadRecord(f"changes: {news.changes.at} can't come after {news.changes.since}")
    if facts is not None:
        if not POOL.fullmatch(facts.pool):
            raise BadRecord(f"pool: expected a pool's name, found {facts.pool[:60]!r}")
        _check_url(facts.url, peer, allowed_hosts)


def _check_id(node_id: str) -> None:
    if not ID.fullmatch(node_id):
        raise BadRecord(f"id: expected 1 to 253 letters, digits and . _ : -, found {node_id[:60]!r}")


def _check_url(url: str, peer: str, allowed_hosts: Collection[str]) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError for an invalid port
    except ValueError as error:
        raise BadRecord(f"url: {error}, found {url[:100]!r}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.username is not None:
        raise BadRecord(f"url: expected http://HOST:PORT, found {url[:100]!r}")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise BadRecord(f"url: expected a host and a port alone, found {url[:100]!r}")
    if parts.hostname not in allowed_hosts and _address(parts.hostname) != _address(peer):
        raise BadRecord(
            f"url: {parts.hostname} is neither the address that the record came from ({peer}) nor in gateway.node_hosts"
        )


def _address(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


class RecordRates:
    """Limits how often a node's reports are checked. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def allows(self, node_id: str) -> bool:
        """Returns whether the node may send one more report now, and counts it. Raises BadRecord for an invalid node
        id, which is not remembered."""
        _check_id(node_id)
        now, capacity = self._clock(), RECORDS_PER_SECOND * BURST_SECONDS
        bucket = self._buckets.setdefault(node_id, Bucket(RECORDS_PER_SECOND, capacity, now))
        self._buckets.move_to_end(node_id)
        if len(self._buckets) > MAX_RATES:
            self._buckets.popitem(last=False)
        return bucket.take(1, now)
