"""Parts of a service are killed, hung and emptied under load: two nodes, two gateway workers and a Redis.

Callers stream greedy generations whose text is known; others deploy, submit asynchronous calls and batches, and change
policies. Then everything has to come to rest.

- A storm: every few seconds one part is killed (an engine, a node's API process, a gateway worker, be it the one that
  leads, Redis), hung for some seconds (a node's API process, Redis) or emptied (Redis). A caller calls again when its
  connection breaks off (its worker was killed), as any client does; these are `cut`.
- `--every SECONDS`: what an operator may see. One part is killed each time: what the storm kills, the whole gateway, or
  a whole node. Calls begin at a steady rate, whether or not others have ended, and none is made again: whatever is not
  done is `refused`, also where the connection broke or could not be made (`cut`).

An error of the contract is an answer (`refused`). `unanswered`: calls that never got one. `wrong_tokens`: calls of
which any token differs from what it had to be. `lost_acknowledged`: deploys, and requests in the metering, that were
acknowledged and are not there in the end. `leaked`: requests, leases, KV blocks, reservations and places that are still
held. `jobs_wrong`: what benchmarks.faults.jobs.WRONG says of asynchronous calls and batches; `policies_wrong`: what
benchmarks.faults.policies.WRONG says of functions' policies, which are changed all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.common.http_service import HttpService
from benchmarks.common.load import read_events
from benchmarks.common.report import STORIES, arguments, example_adapter, publish, report
from benchmarks.faults.jobs import BATCHED, EVENTS, WRONG, Jobs
from benchmarks.faults.policies import WRONG as POLICIES_WRONG
from benchmarks.faults.policies import Policies
from benchmarks.faults.rest import at_rest, children, leader, lost
from cluster.redis_link import prefix_of
from tests.support.redis_server import RedisServer, redis_server

CALLERS = 4
TOKENS = 40
TRIES = 20
"""Attempts at one call whose connection breaks, or which is refused with an invitation to try again."""
ANSWER_SECONDS = 60.0
PROMPTS = ("Once upon a time", "The dragon", "A little girl named Lily")
STORM = ("engine", "worker", "leader", "redis", "api", "hang_api", "empty_redis", "hang_redis")
KILLED = ("worker", "engine", "leader", "gateway", "api", "redis", "node")
"""Parts that are killed once each in this order, and then as drawn."""
STORM_PAUSE, QUICK_PAUSE = 4.0, 1.5
CALL_PAUSE, QUICK_CALL_PAUSE = 0.05, 0.3
RATE, QUICK_RATE = 4.0, 2.0
"""Calls per second, of those that begin whether or not others have ended."""
FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass
class Outcomes:
    counts: Counter[str] = field(default_factory=Counter)
    """requests, done, refused, cut, wrong_tokens, unanswered"""
    deployed: dict[str, str] = field(default_factory=dict)
    """Digests of the functions whose deploy was acknowledged."""
    kills: Counter[str] = field(default_factory=Counter)
    redis_harms: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) in monotonic seconds"""
    after: dict[str, Counter[str]] = field(default_factory=dict)
    """Harm -> reasons for which calls that ended after it were not done."""


class Chaos:
    def __init__(self, service: HttpService, redis: RedisServer, seed: int, quick: bool) -> None:
        self.service, self.redis, self.seed = service, redis, seed
        self.rate, self.pause = (QUICK_RATE, QUICK_CALL_PAUSE) if quick else (RATE, CALL_PAUSE)
        self.outcomes = Outcomes()
        self.expected: dict[tuple[str, str], str] = {}
        self.functions = [f"a{index}" for index in range(len(service.adapters))]
        self.jobs: Jobs | None = None
        self.policies = Policies(service, seed, TOKENS)
        self._last = "nothing"

    async def run(self, seconds: float, interval_s: float | None, pause: float) -> None:
        """Runs load and harms. `interval_s`: `--every`, or None for a storm; `pause`: the storm's, in seconds."""
        headers = {"authorization": f"Bearer {self.service.key}"}
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
            for function in self.functions:
                for prompt in PROMPTS:
                    self.expected[function, prompt] = (await self._stream(session, function, prompt))[1]
            for name in (EVENTS, BATCHED):
                await self._deploy_as(session, name, self.service.adapters[0])
            texts = {prompt: self.expected[self.functions[0], prompt] for prompt in PROMPTS}
            self.jobs = jobs = Jobs(self.service, self.seed, TOKENS, texts)
            await self.policies.prepare(session)
            until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                group.create_task(jobs.run(session, until))
                group.create_task(self.policies.run(session, until))
                draws = [random.Random(self.seed * 100 + number) for number in range(CALLERS)]
                if interval_s is None:
                    for draw in draws:
                        group.create_task(self._call_on(session, until, draw))
                else:
                    group.create_task(self._call_steadily(session, until, draws[0]))
                group.create_task(self._deploy(session, until))
                harms = STORM if interval_s is None else KILLED
                group.create_task(self._harm(until, interval_s or pause, harms, random.Random(self.seed)))

    async def _call_on(self, session: aiohttp.ClientSession, until: float, draw: random.Random) -> None:
        """Makes one call after another; calls whose connection breaks are made again."""
        counts = self.outcomes.counts
        while time.monotonic() < until:
            function, prompt = draw.choice(self.functions), draw.choice(PROMPTS)
            counts["requests"] += 1
            for _ in range(TRIES):
                if await self._call(session, function, prompt) != "cut":
                    break
                await asyncio.sleep(0.2)
            else:
                counts["unanswered"] += 1
            await asyncio.sleep(self.pause)

    async def _call_steadily(self, session: aiohttp.ClientSession, until: float, draw: random.Random) -> None:
        """Each call as it comes, once."""
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                function, prompt = draw.choice(self.functions), draw.choice(PROMPTS)
                group.create_task(self._call_once(session, function, prompt))
                await asyncio.sleep(draw.expovariate(self.rate))

    async def _call_once(self, session: aiohttp.ClientSession, function: str, prompt: str) -> None:
        counts, begin = self.outcomes.counts, time.monotonic()
        counts["requests"] += 1
        if await self._call(session, function, prompt) == "cut":
            counts["refused"] += 1
            counts["unanswered"] += time.monotonic() - begin >= ANSWER_SECONDS

    async def _call(self, session: aiohttp.ClientSession, function: str, prompt: str) -> str:
        """Returns how the call ended."""
        outcome, text, reason = await self._stream(session, function, prompt)
        self.outcomes.counts[outcome] += 1
        expected = self.expected[function, prompt]
        if text != expected if outcome == "done" else not expected.startswith(text):
            self.outcomes.counts["wrong_tokens"] += 1
        if outcome != "done":
            self.outcomes.after.setdefault(self._last, Counter())[reason] += 1
        return outcome

    async def _stream(self, session: aiohttp.ClientSession, function: str, prompt: str) -> tuple[str, str, str]:
        """Returns how the call ended (done, refused, cut), its text, and why it was not done."""
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        text, event, last = "", "", b"{}"
        try:
            async with session.post(f"{self.service.url}/invoke/{function}", json=body) as reply:
                if reply.status != 200:
                    return "refused", "", _reason(await reply.read())
                async for event, last in read_events(reply.content):
                    text += json.loads(last)["text"] if event == "token" else ""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return "cut", text, type(error).__name__
        if event == "error":
            return "refused", text, _reason(last)
        return ("done" if event == "done" else "cut"), text, "stream without an end"

    async def _deploy(self, session: aiohttp.ClientSession, until: float) -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            folder = self.service.adapters[number % len(self.service.adapters)]
            self.outcomes.counts["deploys_asked"] += 1
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await self._deploy_as(session, f"d{number}", folder)
            await asyncio.sleep(0.5)

    async def _deploy_as(self, session: aiohttp.ClientSession, name: str, folder: Path) -> None:
        form = aiohttp.FormData()
        for file in FILES:
            form.add_field(file, (folder / file).read_bytes(), filename=file)
        async with session.post(f"{self.service.url}/deploy/{name}", data=form) as reply:
            if reply.status == 201:
                self.outcomes.deployed[name] = (await reply.json())["digest"]

    async def _harm(self, until: float, pause: float, harms: tuple[str, ...], draw: random.Random) -> None:
        for number in range(10_000):
            await asyncio.sleep(pause * draw.uniform(0.7, 1.3))
            if time.monotonic() >= until - pause:
                return
            harm = harms[number] if number < len(harms) else draw.choice(harms)
            self._last, begin = harm, time.monotonic()
            if await self._do(harm, draw):
                self.outcomes.kills[harm] += 1
            if "redis" in harm:
                self.outcomes.redis_harms.append((begin, time.monotonic()))

    async def _do(self, harm: str, draw: random.Random) -> bool:
        """Returns False if there was nothing to harm."""
        if harm == "redis":
            await asyncio.to_thread(self.redis.kill)
            await asyncio.sleep(draw.uniform(0.2, 2.0))
            await asyncio.to_thread(self.redis.start)
        elif harm == "empty_redis":
            await asyncio.to_thread(self.redis.empty)
        elif harm == "hang_redis":
            self.redis.hang()
            await asyncio.sleep(draw.uniform(0.5, 2.0))
            self.redis.wake()
        else:
            return await self._harm_process(harm, draw)
        return True

    async def _harm_process(self, harm: str, draw: random.Random) -> bool:
        if harm == "leader":
            pids = await asyncio.to_thread(leader, self.service)
        else:
            pids = children(self.service.pid)[harm.removeprefix("hang_")]
        if not pids:
            return False
        pid = draw.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            if harm.startswith("hang_"):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(draw.uniform(1.0, 4.0))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
            return True
        return False


def _reason(body: bytes) -> str:
    """The type of an error of the contract."""
    try:
        return str(json.loads(body)["error"]["type"])
    except (ValueError, KeyError, TypeError):
        return "an error without a type"


def main() -> None:
    parser = arguments(__doc__ or "", STORIES)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, help="instead of --seconds")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="kill one part so often, instead of a storm")
    options = parser.parse_args()
    interval_s: float | None = options.every
    quick = 15.0 if interval_s is None else interval_s * (len(KILLED) + 2)
    seconds = quick if options.quick else options.minutes * 60 if options.minutes else options.seconds
    pause = QUICK_PAUSE if options.quick else STORM_PAUSE
    adapters = [example_adapter(options.model, name) for name in ("dragon", "pirate")]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as root, redis_server(Path(root)) as redis:
        shared = f"workers: 2, redis: '{redis.url}'"
        sizes = ", adapter_memory: 64MiB, host_memory: 64MiB, kv_memory: 64MiB"
        nodes = ("--nodes", "2")
        with HttpService(
            options.model, adapters, Path(root) / "s", "float32", 1, sizes, shared, nodes, prefix_cache="auto"
        ) as service:
            chaos = Chaos(service, redis, options.seed, options.quick)
            asyncio.run(chaos.run(seconds, interval_s, pause))
            assert chaos.jobs is not None
            jobs, wrong = chaos.jobs.check(chaos.outcomes.kills.total())
            policies_wrong = chaos.policies.check(chaos.outcomes.redis_harms)
            still_held = at_rest(service, redis, prefix_of(service.secret))
            done = len(chaos.expected) + chaos.outcomes.counts["done"]
            missing = lost(service, chaos.outcomes.deployed, chaos.functions, done)
    outcomes = chaos.outcomes
    figures: dict[str, float] = {"kills": outcomes.kills.total(), "lost_acknowledged": sum(missing.values())}
    counted = ("requests", "done", "refused", "cut", "wrong_tokens", "unanswered", "deploys_asked")
    figures |= {name: outcomes.counts[name] for name in counted}
    figures |= {"leaked": sum(still_held.values()), "deploys": len(outcomes.deployed), "jobs_wrong": wrong.total()}
    figures |= {"events": jobs["events"], "batches": jobs["batches"], "batch_lines": jobs["lines"]}
    figures |= {"policies_wrong": policies_wrong.total(), **chaos.policies.counts}
    after = {harm: dict(reasons) for harm, reasons in outcomes.after.items()}
    row = {"kills": dict(outcomes.kills), "not_done_after": after, "held": still_held, "missing": missing}
    row |= {"jobs": dict(jobs), "jobs_wrong": {name: wrong[name] for name in WRONG}}
    row |= {"policies_wrong": {name: policies_wrong[name] for name in POLICIES_WRONG}}
    settings: dict[str, Any] = {"seconds": seconds, "tokens": TOKENS, "nodes": 2, "workers": 2}
    settings |= (
        {"pause": pause, "callers": CALLERS} if interval_s is None else {"every": interval_s, "rate": chaos.rate}
    )
    settings |= {"model": options.model.name, "took_s": round(time.monotonic() - begin)}
    publish(report("chaos", settings, options.seed, [row], figures), options.json)


if __name__ == "__main__":
    main()
