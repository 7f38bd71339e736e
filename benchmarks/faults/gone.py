"""Resources of a service are taken away in the middle of calls of every route, and given back.

A service with two gateway workers, a Redis, a registry in S3 (moto's server behind a proxy) and its state on a small
disk. Callers draw routes of the API document and call them without a pause. Meanwhile one resource after the other is
taken away for some seconds: the disk is filled, descriptors or memory of the gateway's workers are limited, Redis is
killed or stopped, the object store fails or stays silent.

`calls`: calls with a reply. Every other figure must be 0:

- `unanswered`: calls without a reply within ANSWER_S.
- `cut`: calls whose connection broke, unless descriptors or memory were gone.
- `wrong`: replies that are no answer of the contract: a status 500, an error that is no JSON of the contract's shape,
  or a status that invites the caller to try again without `Retry-After`.
- `unrecovered`: resources after which no call succeeded within RECOVERY_S.
- `lost`: functions, tenants, keys, files, batches and asynchronous calls that were acknowledged and are not there, or
  have not ended, REST_S after the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common.http_service import HttpService
from benchmarks.common.report import ROOT, STORIES, arguments, example_adapter, report, run_study
from benchmarks.faults.acknowledged import Acknowledged, lost
from benchmarks.faults.resources import (
    DISK_MIB,
    Resource,
    descriptors,
    disk,
    memory,
    proxied_store,
    redis_killed,
    redis_stopped,
    store_failing,
    store_silent,
)
from benchmarks.faults.rest import children
from benchmarks.faults.routes import CALL, FUNCTION, REQUESTS, Names, Request
from cluster.errors import RETRIED
from tests.support.redis_server import redis_server
from tests.support.small_disk import mounted

CALLERS = 6
ANSWER_S = 60.0
GONE_S, BACK_S = 3.0, 2.0
"""Seconds for which a resource is away, and then back, before the next one."""
RECOVERY_S = 60.0
MAX_EXAMPLES = 40
"""Number of wrong replies that the report shows."""
TRACE_CHARACTERS = 600
MAY_CUT = ("descriptors", "memory")


@dataclass
class Outcomes:
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    """statuses of replies by the resource that was away"""
    longest_s: dict[str, float] = field(default_factory=dict)
    acknowledged: Acknowledged = field(default_factory=Acknowledged)

    def count(self, problem: str, away: str, what: str, reply: str) -> None:
        self.counts[problem] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append({"problem": problem, "away": away, "call": what, "reply": reply[:400]})


class Fuzz:
    """Callers of all routes, and the resources that are taken away."""

    def __init__(self, service: HttpService, adapter: Path, resources: list[Resource], seed: int) -> None:
        self._service, self._resources, self._seed = service, resources, seed
        self._names = Names(adapter, random.Random(seed))
        self._away = ""
        self.outcomes = Outcomes()

    async def run(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(self._service.url, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for caller in range(CALLERS):
                group.create_task(self._call_on(session, random.Random(f"{self._seed} {caller}")))
            group.create_task(self._take_in_turn(session, random.Random(self._seed)))

    async def _take_in_turn(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        while time.monotonic() < self._until:
            for each in draw.sample(self._resources, len(self._resources)):
                if time.monotonic() > self._until:
                    break
                self._away = each.name
                await asyncio.to_thread(each.take)
                try:
                    await asyncio.sleep(GONE_S * draw.uniform(0.5, 1.5))
                finally:
                    await asyncio.to_thread(each.give_back)
                await asyncio.sleep(BACK_S)
                if not await self._recovers(session):
                    self.outcomes.count("unrecovered", each.name, "", "")
                self._away = ""

    async def _recovers(self, session: aiohttp.ClientSession) -> bool:
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            try:
                async with session.post(f"/invoke/{FUNCTION}", json=CALL, headers=self._headers(False)) as reply:
                    if reply.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.2)
        return False

    async def _call_on(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        order: list[tuple[str, str]] = []
        while time.monotonic() < self._until:
            order = order or draw.sample(list(REQUESTS), len(REQUESTS))
            method, path = order.pop()
            await self._call(session, method, path, REQUESTS[method, path](self._names))

    async def _call(self, session: aiohttp.ClientSession, method: str, path: str, request: Request) -> None:
        away, begin, what = self._away, time.monotonic(), f"{method} {path}"
        body = {"data": request.form()} if request.form else {} if request.json is None else {"json": request.json}
        headers = {**self._headers(request.admin), **request.headers}
        try:
            async with session.request(method, request.path, headers=headers, **body) as reply:
                text = await reply.text()
        except TimeoutError:
            self.outcomes.count("unanswered", away, what, "")
            return
        except aiohttp.ClientError as error:
            if not {away, self._away} & set(MAY_CUT):
                self.outcomes.count("cut", away or self._away, what, repr(error))
            return
        away = away or self._away
        outcomes, took_s = self.outcomes, time.monotonic() - begin
        outcomes.counts["calls"] += 1
        outcomes.statuses.setdefault(away, Counter())[reply.status] += 1
        outcomes.longest_s[away] = max(outcomes.longest_s.get(away, 0.0), took_s)
        if problem := _problem(reply.status, reply.headers.get("retry-after"), path, text):
            outcomes.count("wrong", away, what, f"{reply.status}, {problem}: {text}")
        if reply.status < 300 and request.makes:
            outcomes.acknowledged.add(request, text, self._names.ids)

    def _headers(self, admin: bool) -> dict[str, str]:
        return {"authorization": f"Bearer {self._service.admin_key if admin else self._service.key}"}


def _problem(status: int, retry_after: str | None, path: str, text: str) -> str:
    """Returns what is wrong with a reply; empty if nothing is."""
    if status < 400 or path == "/readyz":
        return ""
    try:
        error = json.loads(text)["error"]
        shaped = bool(error["type"] and error["message"])
    except (ValueError, KeyError, TypeError):
        shaped = False
    if not shaped:
        return "no error of the contract"
    if status == 500:
        return "an internal error"
    return "no Retry-After" if status in RETRIED and retry_after is None else ""


def _stack_traces(logs: Path) -> dict[str, int]:
    """Returns how often each stack trace is in the logs: their last characters, without this host's folders, the most
    frequent first."""
    counts = Counter[str]()
    for log in logs.glob("*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if "Traceback" in line:
                for folder in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
                    line = line.replace(f"{folder}/", "")
                counts[line[-TRACE_CHARACTERS:]] += 1
    return dict(counts.most_common(MAX_EXAMPLES))


def study(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    seconds = 20.0 if options.quick else options.minutes * 60
    adapter = example_adapter(options.model, "dragon")
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(root))
        registry, proxy = stack.enter_context(proxied_store())
        sizes = ", adapter_memory: 64MiB, host_memory: 64MiB, kv_memory: 64MiB"
        service = HttpService(
            options.model, [adapter], root / "s", "float32", 1, sizes, f"workers: 2, redis: '{redis.url}'",
            registry=registry,
        )  # fmt: skip
        state = service.root / ".garnish"
        small = stack.enter_context(mounted(state, "tmpfs", DISK_MIB))
        stack.enter_context(service)

        def workers() -> list[int]:
            return children(service.pid)["worker"]

        resources = [redis_killed(redis), redis_stopped(redis), store_failing(proxy), store_silent(proxy)]
        resources += [descriptors(workers), memory(workers), *([disk(small)] if small is not None else [])]
        if small is None:
            print("NOT RUN: the disk; mounting a tmpfs needs the right to mount")
        fuzz = Fuzz(service, adapter, resources, options.seed)
        asyncio.run(fuzz.run(seconds))
        missing = lost(service, fuzz.outcomes.acknowledged)
        traces = _stack_traces(state / "logs")
    outcomes = fuzz.outcomes
    figures: dict[str, float] = {
        name: outcomes.counts[name] for name in ("calls", "unanswered", "cut", "wrong", "unrecovered")
    }
    figures |= {"acknowledged": outcomes.acknowledged.total, "lost": len(missing)}
    by_resource = {
        away or "none": {"statuses": dict(statuses), "longest_s": round(outcomes.longest_s[away], 2)}
        for away, statuses in outcomes.statuses.items()
    }
    row = {
        "by_resource": by_resource,
        "examples": outcomes.examples,
        "missing": missing[:MAX_EXAMPLES],
        "stack_traces": traces,
    }
    settings = {"seconds": seconds, "callers": CALLERS, "routes": len(REQUESTS), "disk": small is not None}
    return report("gone", settings | {"model": options.model.name}, options.seed, [row], figures)


def main() -> None:
    parser = arguments(__doc__ or "", STORIES)
    parser.add_argument("--minutes", type=float, default=30.0)
    run_study(study, parser.parse_args())


if __name__ == "__main__":
    main()
