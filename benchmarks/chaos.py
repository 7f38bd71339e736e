"""Parts of a service are killed, hung and emptied under load: two nodes, two gateway workers and a Redis.

Callers stream greedy generations whose text is known, one after another; another one deploys. Every few seconds one
part is killed (an engine, a node's API process, a gateway worker, Redis), hung for some seconds (a
node's API process, Redis) or emptied (Redis). Then everything has to come to rest.

A caller whose connection breaks off (its worker was killed) calls again, as any client does; these are `cut`. An error
of the contract is an answer (`refused`). `unanswered`: calls that never got one. `wrong_tokens`: calls of which any
token differs from what it had to be. `lost_acknowledged`: deploys, and requests in the metering, that were acknowledged
and are not there in the end. `leaked`: requests, leases, KV blocks, reservations and places that are still held.
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

from benchmarks.chaos_rest import at_rest, children, lost
from benchmarks.http_service import HttpService
from benchmarks.redis_server import RedisServer, redis_server
from benchmarks.report import ROOT, arguments, publish, report
from cluster.redis_link import prefix_of

CALLERS = 4
TOKENS = 40
TRIES = 20
"""Of one call, whose connection breaks or which is refused with an invitation to try again."""
ANSWER_SECONDS = 60.0
PROMPTS = ("Once upon a time", "The dragon", "A little girl named Lily")
WAYS = ("engine", "worker", "redis", "api", "hang_api", "empty_redis", "hang_redis")
"""Each once, in this order, and then as they are drawn."""
FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass
class Seen:
    counts: Counter[str] = field(default_factory=Counter)
    """requests, done, refused, cut, wrong_tokens, unanswered"""
    deployed: dict[str, str] = field(default_factory=dict)
    """Digests of the functions whose deploy was acknowledged."""
    kills: Counter[str] = field(default_factory=Counter)


class Chaos:
    def __init__(self, service: HttpService, redis: RedisServer, seed: int) -> None:
        self.service, self.redis, self.seed = service, redis, seed
        self.seen = Seen()
        self.expected: dict[tuple[str, str], str] = {}
        self.functions = [f"a{index}" for index in range(len(service.adapters))]

    async def run(self, seconds: float, pause: float) -> None:
        headers = {"authorization": f"Bearer {self.service.key}"}
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            for function in self.functions:
                for prompt in PROMPTS:
                    self.expected[function, prompt] = (await self._stream(session, function, prompt))[1]
            until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                for number in range(CALLERS):
                    group.create_task(self._call(session, until, random.Random(self.seed * 100 + number)))
                group.create_task(self._deploy(session, until))
                group.create_task(self._harm(until, pause, random.Random(self.seed)))

    async def _call(self, session: aiohttp.ClientSession, until: float, draw: random.Random) -> None:
        counts = self.seen.counts
        while time.monotonic() < until:
            function, prompt = draw.choice(self.functions), draw.choice(PROMPTS)
            counts["requests"] += 1
            for _ in range(TRIES):
                outcome, text = await self._stream(session, function, prompt)
                counts[outcome] += 1
                expected = self.expected[function, prompt]
                if text != expected if outcome == "done" else not expected.startswith(text):
                    counts["wrong_tokens"] += 1
                if outcome in ("done", "refused"):
                    break
                await asyncio.sleep(0.2)
            else:
                counts["unanswered"] += 1
            await asyncio.sleep(0.05)

    async def _stream(self, session: aiohttp.ClientSession, function: str, prompt: str) -> tuple[str, str]:
        """How it ended (done, refused, cut), and the text that came."""
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        text, event = "", ""
        try:
            async with session.post(f"{self.service.url}/invoke/{function}", json=body) as reply:
                if reply.status != 200:
                    await reply.read()
                    return "refused", ""
                async for line in reply.content:
                    if line.startswith(b"event: "):
                        event = line[7:].strip().decode()
                    elif line.startswith(b"data: ") and event == "token":
                        text += json.loads(line[6:])["text"]
        except (aiohttp.ClientError, TimeoutError, OSError):
            return "cut", text
        return {"done": "done", "error": "refused"}.get(event, "cut"), text

    async def _deploy(self, session: aiohttp.ClientSession, until: float) -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            folder = self.service.adapters[number % len(self.service.adapters)]
            form = aiohttp.FormData()
            for name in FILES:
                form.add_field(name, (folder / name).read_bytes(), filename=name)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.post(f"{self.service.url}/deploy/d{number}", data=form) as reply:
                    if reply.status == 201:
                        self.seen.deployed[f"d{number}"] = (await reply.json())["digest"]
            await asyncio.sleep(0.5)

    async def _harm(self, until: float, pause: float, draw: random.Random) -> None:
        for number in range(10_000):
            await asyncio.sleep(pause * draw.uniform(0.7, 1.3))
            if time.monotonic() >= until - pause:
                return
            way = WAYS[number] if number < len(WAYS) else draw.choice(WAYS)
            if await self._do(way, draw):
                self.seen.kills[way] += 1

    async def _do(self, way: str, draw: random.Random) -> bool:
        """Whether there was something to harm."""
        if way == "redis":
            await asyncio.to_thread(self.redis.kill)
            await asyncio.sleep(draw.uniform(0.2, 2.0))
            await asyncio.to_thread(self.redis.start)
        elif way == "empty_redis":
            await asyncio.to_thread(self.redis.empty)
        elif way == "hang_redis":
            self.redis.hang()
            await asyncio.sleep(draw.uniform(0.5, 2.0))
            self.redis.wake()
        else:
            return await self._harm_process(way, draw)
        return True

    async def _harm_process(self, way: str, draw: random.Random) -> bool:
        found = children(self.service.pid)[way.removeprefix("hang_")]
        if not found:
            return False
        pid = draw.choice(found)
        with contextlib.suppress(ProcessLookupError):
            if way.startswith("hang_"):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(draw.uniform(1.0, 4.0))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
            return True
        return False


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, help="instead of --seconds")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "stories260K")
    options = parser.parse_args()
    seconds = 15.0 if options.quick else options.minutes * 60 if options.minutes else options.seconds
    pause = 1.5 if options.quick else 4.0
    adapters = [ROOT / "examples" / "adapters" / options.model.name / name for name in ("dragon", "pirate")]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as root, redis_server(Path(root)) as redis:
        shared = f"workers: 2, redis: '{redis.url}'"
        sizes = ", adapter_memory: 64MiB, host_memory: 64MiB, kv_memory: 64MiB"
        nodes = ("--nodes", "2")
        with HttpService(options.model, adapters, Path(root) / "s", "float32", 1, sizes, shared, nodes) as service:
            chaos = Chaos(service, redis, options.seed)
            asyncio.run(chaos.run(seconds, pause))
            held = at_rest(service, redis, prefix_of(service.secret))
            missing = lost(service, chaos.seen.deployed, len(chaos.expected) + chaos.seen.counts["done"])
    seen = chaos.seen
    figures: dict[str, float] = {"kills": seen.kills.total(), "lost_acknowledged": sum(missing.values())}
    figures |= {
        name: seen.counts[name] for name in ("requests", "done", "refused", "cut", "wrong_tokens", "unanswered")
    }
    figures |= {"leaked": sum(held.values()), "deploys": len(seen.deployed)}
    rows: list[dict[str, Any]] = [{"kills": dict(seen.kills), "held": held, "missing": missing}]
    settings = {"seconds": seconds, "pause": pause, "callers": CALLERS, "tokens": TOKENS, "nodes": 2, "workers": 2}
    settings |= {"model": options.model.name, "took_s": round(time.monotonic() - begin)}
    publish(report("chaos", settings, options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
