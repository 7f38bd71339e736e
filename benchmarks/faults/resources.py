"""Resources of a running service that can be taken away and given back: disk, descriptors, memory, Redis, object store.

The disk is a small tmpfs that holds the whole state directory, so it needs the right to mount. Descriptors and memory
are limited by `prlimit` in the running processes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.s3 import s3_server
from tests.support.redis_server import RedisServer
from tests.support.s3_proxy import Fault, Proxy
from tests.support.small_disk import SmallDisk

DISK_MIB = 256
FEW_DESCRIPTORS = 2
"""Number of descriptors that a process may still open."""
FEW_BYTES = 4 << 20
"""Bytes of address space that a process may still map."""
ALWAYS = 1 << 30
"""Number of requests that a fault of the store meets: all of them."""
ENDPOINT = "AWS_ENDPOINT_URL_S3"


@dataclass(frozen=True)
class Resource:
    """A resource with the two functions that take it away and give it back."""

    name: str
    take: Callable[[], object]
    give_back: Callable[[], object]


def redis_killed(redis: RedisServer) -> Resource:
    """Returns a Redis that is killed, and starts empty."""
    return Resource("redis killed", redis.kill, redis.start)


def redis_stopped(redis: RedisServer) -> Resource:
    """Returns a Redis that accepts connections but answers nothing."""
    return Resource("redis silent", redis.hang, redis.wake)


def store_failing(proxy: Proxy) -> Resource:
    """Returns an object store that answers each request with status 503."""
    fault = Fault("refuse", times=ALWAYS, status=503, code="SlowDown")
    return Resource("store 503", lambda: proxy.faults.append(fault), proxy.faults.clear)


def store_silent(proxy: Proxy) -> Resource:
    """Returns an object store that accepts requests but answers none."""
    return Resource("store silent", lambda: proxy.faults.append(Fault("stall", times=ALWAYS)), proxy.faults.clear)


def disk(small: SmallDisk) -> Resource:
    """Returns a disk that is filled by a file."""
    return Resource("disk full", small.fill, small.free)


def descriptors(pids: Callable[[], list[int]]) -> Resource:
    """Returns the descriptors of the processes `pids`."""
    return _limited("descriptors", resource.RLIMIT_NOFILE, pids, lambda pid: _highest(pid) + 1 + FEW_DESCRIPTORS)


def memory(pids: Callable[[], list[int]]) -> Resource:
    """Returns the address space of the processes `pids`."""
    return _limited("memory", resource.RLIMIT_AS, pids, lambda pid: _mapped(pid) + FEW_BYTES)


def _limited(name: str, kind: int, pids: Callable[[], list[int]], limit: Callable[[int], int]) -> Resource:
    before: dict[int, tuple[int, int]] = {}

    def take() -> None:
        for pid in pids():
            with suppress(ProcessLookupError, FileNotFoundError):
                before[pid] = resource.prlimit(pid, kind)
                resource.prlimit(pid, kind, (limit(pid), before[pid][1]))

    def give_back() -> None:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, kind, limits)
        before.clear()

    return Resource(name, take, give_back)


def _highest(pid: int) -> int:
    return max(int(entry) for entry in os.listdir(f"/proc/{pid}/fd"))


def _mapped(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def proxied_store() -> Iterator[tuple[str, Proxy]]:
    """Starts an S3 server behind a proxy, to which boto3's environment variables point. Yields the URL of a registry in
    an empty bucket, and the proxy."""
    with s3_server() as url, Proxy(os.environ[ENDPOINT]) as proxy:
        os.environ[ENDPOINT] = proxy.url
        yield url, proxy
