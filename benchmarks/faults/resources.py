"""Resources of a running service that can be taken away and given back: disk, descriptors, memory, Redis, object store.

The disk is a small tmpfs that holds the whole state directory, so it needs the right to mount. Descriptors and memory
are limited by `prlimit` in the running processes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.redis_server import RedisServer
from tests.support.s3_proxy import Fault, Proxy

DISK_BYTES = 256 << 20
FEW_DESCRIPTORS = 2
"""Number of descriptors that a process may still open."""
FEW_BYTES = 4 << 20
"""Bytes of address space that a process may still map."""
ALWAYS = 1 << 30
"""Number of requests that a fault of the store meets: all of them."""


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


def disk(folder: Path) -> Resource:
    """Returns the disk that holds `folder`, which is filled by a file."""
    ballast = folder / "ballast"

    def fill() -> None:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0")

    return Resource("disk full", fill, lambda: ballast.unlink(missing_ok=True))


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
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a tmpfs of DISK_BYTES on `folder`. Yields False if this user may not mount."""
    folder.mkdir(parents=True)
    options = f"size={DISK_BYTES},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def s3_store(bucket: str) -> Iterator[Proxy]:
    """Starts an S3 server with an empty bucket behind a proxy, to which boto3's environment variables point."""
    script = Path(__file__).parents[2] / "tests" / "support" / "s3_server.py"
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        with Proxy(f"http://127.0.0.1:{int(server.stdout.readline())}") as proxy:
            before = dict(os.environ)
            os.environ |= {
                "AWS_ENDPOINT_URL_S3": proxy.url, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            }  # fmt: skip
            try:
                subprocess.run([sys.executable, "-c", _BUCKET, bucket], check=True)
                yield proxy
            finally:
                os.environ.clear()
                os.environ.update(before)
        server.stdin.close()


_BUCKET = "import boto3, sys; boto3.client('s3').create_bucket(Bucket=sys.argv[1])"
