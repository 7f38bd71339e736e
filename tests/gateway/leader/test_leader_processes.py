"""Leaders as processes of their own, and as workers of a gateway: killed ones are replaced, stopped ones stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_gateway_server import config  # noqa: F401  (a fixture)
from test_gateway_workers import Pair, pair  # noqa: F401  (a fixture)

from adapters.local_store import LocalStore
from gateway.leader.leader import BEATS_A_LEASE
from gateway.usage.counts import UsageCounts
from gateway.usage.hours import HOUR, hour_name, hour_start
from gateway.usage.objects import usage_folder
from tests.support.redis_server import RedisServer, redis_server

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from time import monotonic
from prometheus_client import CollectorRegistry
from adapters.local_store import LocalStore
from cluster.leases import RedisLeases
from cluster.redis_link import RedisLink
from gateway.leader.leader import Leader
from gateway.leader.metrics import LeaderMetrics
from gateway.leader.store_leases import StoreLeases
from gateway.leader.tick import Job

name, registry, log, redis, seconds = sys.argv[1:]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def tell(what):
    os.write(out, f"{name} {what} {monotonic()}\\n".encode())

async def steps(tick):
    while True:
        tick.check()
        tell("step")
        await asyncio.sleep(0.02)

class Told(Leader):
    async def beat(self):
        await super().beat()
        tell("beat")

async def lead(leases):
    metrics = LeaderMetrics(CollectorRegistry())
    async with Told(leases, name, [Job("steps", steps, 0.1)], metrics, monotonic, float(seconds)).running():
        await asyncio.sleep(3600)

async def main():
    if not redis:
        return await lead(StoreLeases(LocalStore(Path(registry)), monotonic))
    link = RedisLink(redis, "test:", name, monotonic)
    async with link.running():
        await link.wait_until_up(60)
        await lead(RedisLeases(link))

asyncio.run(main())
"""


SECONDS = 2.5
"""Of the lease."""


class Processes:
    def __init__(self, folder: Path, redis: str, stack: ExitStack) -> None:
        self._folder, self._redis, self._stack = folder, redis, stack
        self.log = folder / "steps"
        self.log.touch()

    def start(self, name: str) -> subprocess.Popen[bytes]:
        told = name, str(self._folder / "registry"), str(self.log), self._redis, str(SECONDS)
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, *told])
        self._stack.callback(child.wait, 30)
        self._stack.callback(child.kill)
        return child

    def steps(self, name: str) -> list[float]:
        """When the leader of this name took its steps, by the monotonic clock that all processes share."""
        return self._when(name, "step")

    def beats(self, name: str) -> int:
        """How often it has asked for the lease."""
        return len(self._when(name, "beat"))

    def _when(self, name: str, what: str) -> list[float]:
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [float(when) for *told, when in lines if told == [name, what]]


@pytest.fixture(params=["store", "redis"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        server = stack.enter_context(redis_server(tmp_path)) if request.param == "redis" else None
        yield Processes(tmp_path, server.url if server else "", stack)


def until(condition: Callable[[], object]) -> None:
    """A test's own time limit bounds it."""
    while not condition():
        time.sleep(0.02)


def test_a_killed_leader_is_replaced(processes: Processes) -> None:
    one = processes.start("one")
    until(lambda: processes.steps("one"))
    processes.start("two")
    until(lambda: processes.beats("two") > BEATS_A_LEASE + 1)
    assert not processes.steps("two")
    one.kill()
    until(lambda: processes.steps("two"))
    after = processes.steps("two")[0] - processes.steps("one")[-1]
    assert after < 30, "10 s on a host that is not busy"


def test_a_stopped_leader_does_nothing_more(processes: Processes) -> None:
    one = processes.start("one")
    until(lambda: processes.steps("one"))
    one.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    processes.start("two")
    until(lambda: processes.steps("two"))
    before = processes.beats("one")
    one.send_signal(signal.SIGCONT)
    until(lambda: processes.beats("one") > before + 1)  # it had time for steps of its own, and has asked for the lease
    assert not [when for when in processes.steps("one") if when > stopped + 0.5]


def write_hours(registry: Path, hours: int, calls: int) -> int:
    """Objects of hours long over, which no compaction has merged. Returns the calls that they hold."""
    store = LocalStore(registry)
    first = int(time.time()) // HOUR * HOUR - 40 * HOUR
    for number in range(hours):
        key = f"{usage_folder('default')}{hour_name(first + number * HOUR)}/{number:016x}-1.json"
        counts = UsageCounts(calls, 10, 20, 0)
        store.put(key, msgspec.json.encode({"functions": {"stories260K": {"base": counts}}}))
        os.utime(registry / key, (1e9, 1e9))
    return hours * calls


def hours_left(registry: Path) -> list[str]:
    listed = LocalStore(registry).list(usage_folder("default"))
    now = time.time()
    return [info.key for info in listed if info.key.split("/")[3][0] == "2" and _age(info.key, now) > 2 * HOUR]


def _age(key: str, now: float) -> float:
    return now - hour_start(key.split("/")[3])


def leaders(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=60, verify=False).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["worker"]: sample.value for sample in families["garnish_leader"].samples}


def who_leads(url: str) -> list[int]:
    return [int(worker.split("-")[-2]) for worker, leads in leaders(url).items() if leads]


def usage_requests(url: str) -> int:
    params = {"from": str(int(time.time()) - 300 * 24 * HOUR)}
    reply = httpx.get(f"{url}/usage", params=params, timeout=60, verify=False)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["total"]["requests"])


def test_a_killed_worker_that_led_is_replaced_and_its_work_goes_on(pair: Pair) -> None:  # noqa: F811
    registry = Path(pair.config.registry)
    pair.until(lambda: len(who_leads(pair.url)) == 1)
    (led,) = who_leads(pair.url)
    assert led in pair.workers
    expected = write_hours(registry, 30, 7)
    assert usage_requests(pair.url) == expected
    os.kill(led, signal.SIGKILL)
    killed = time.monotonic()
    pair.until(lambda: [pid for pid in who_leads(pair.url) if pid != led])
    assert time.monotonic() - killed < 30, "10 s on a host that is not busy"
    pair.until(lambda: not hours_left(registry))
    assert usage_requests(pair.url) == expected
    pair.until(lambda: len(who_leads(pair.url)) == 1)


def test_the_leader_resigns_when_its_gateway_stops(pair: Pair, tmp_path: Path) -> None:  # noqa: F811
    redis: RedisServer = pair.redis
    pair.until(lambda: len(who_leads(pair.url)) == 1)
    pair.child.send_signal(signal.SIGTERM)
    assert pair.child.wait(60) == 0
    with redis.client as client:
        assert not [key for key in client.keys("*") if key.endswith(b":lease:leader")]
