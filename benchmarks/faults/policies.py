"""Policies of functions that are set and changed during the faults of chaos.py, and their violations.

Four functions, with adapters that no other function has: calls flood `bounded`, whose `max_concurrency` changes; the
copies of `kept` are provisioned and taken back; `idled` is called now and then and has an `idle_ttl`; two writers
change different fields of `tuned`, each numbering its writes. `WRONG` names what is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx

from adapters.functions import Policy, parse_policy
from adapters.open_store import open_store
from adapters.standing import read_standing, stands_in
from benchmarks.common.http_service import HttpService
from benchmarks.common.load import read_events

BOUNDED, KEPT, IDLED, TUNED = "bounded", "kept", "idled", "tuned"
FUNCTIONS = (BOUNDED, KEPT, IDLED, TUNED)
TENANT = "bench"
CALLERS = 6
"""Callers of `bounded`, more than may run."""
LIMITS = (1, 2, 3)
CHANGE_S, COPIES_S, IDLE_CALL_S, CALL_S = 2.0, 6.0, 8.0, 0.3
"""Pauses between two changes, and between two calls of one caller."""
IDLE_TTL_S = 3.0
FIRST_NUMBER = 1000
"""A writer's numbers are values of the field that it writes."""
COPIES = {"device": 1, "host": 1}
BACK_S = 90.0
"""Limit for all to be as policies say after the last harm."""
WRONG = (
    "over_max_concurrency",  # a call ran beside more than allowed, while Redis was in order
    "over_twice_max_concurrency",  # the same while it was not, and each worker gave away its share beside what ran
    "writes_lost",  # a policy that was acknowledged, and is not what the function has in the end
    "copies_missing",  # provisioned, and not there in the end
    "idle_kept",  # nodes that have `idled` in memory long after its idle limit
    "books_wrong",  # functions of which standing.json says something else than their policies
)
"""Counts that have to be 0."""
STALE_S = 3.0
"""Limit for a worker that still uses an earlier policy: a second, and what a busy host adds."""
AWAY_S = 8.0
"""Limit, after Redis is back, for workers to notice and for calls to end that were admitted meanwhile."""


@dataclass
class Writer:
    """The only writer of one field of a function."""

    function: str
    field: str
    number: int = FIRST_NUMBER
    acknowledged: int = 0

    def is_kept(self, policy: dict[str, Any]) -> bool:
        """Returns whether the policy has the last write that was acknowledged, or a later one."""
        return not self.acknowledged or self.acknowledged <= policy.get(self.field, 0) <= self.number


class Policies:
    def __init__(self, service: HttpService, seed: int, tokens: int) -> None:
        self._service, self._tokens = service, tokens
        self._draws = {name: random.Random(f"{seed} {name}") for name in FUNCTIONS}
        self.judge = ConcurrencyJudge()
        self.writers = [Writer(TUNED, "max_age"), Writer(TUNED, "idle_ttl"), Writer(BOUNDED, "max_age")]
        self.counts: Counter[str] = Counter()
        """calls of `bounded` that were done; writes, and those that were acknowledged"""

    async def prepare(self, session: aiohttp.ClientSession) -> None:
        """Deploys the functions; nobody does harm yet."""
        folder = self._service.adapters[0]
        config = json.loads((folder / "adapter_config.json").read_text())
        for number, name in enumerate(FUNCTIONS):
            form = aiohttp.FormData()
            changed = json.dumps({**config, "lora_alpha": config["lora_alpha"] + 1 + number}).encode()
            form.add_field("adapter_config.json", changed, filename="adapter_config.json")
            weights = (folder / "adapter_model.safetensors").read_bytes()
            form.add_field("adapter_model.safetensors", weights, filename="adapter_model.safetensors")
            async with session.post(f"{self._service.url}/deploy/{name}", data=form) as reply:
                assert reply.status in (200, 201), await reply.text()
        assert await self._bound(session, max(LIMITS))
        assert await self._patch(session, IDLED, {"idle_ttl": IDLE_TTL_S})

    async def run(self, session: aiohttp.ClientSession, until: float) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._change_limit(session, until))
            group.create_task(self._change_copies(session, until))
            group.create_task(self._call_idled(session, until))
            for writer in self.writers[:2]:
                group.create_task(self._write_on(session, until, writer))
            for _ in range(CALLERS):
                group.create_task(self._call_on(session, until))

    # --- who changes policies

    async def _change_limit(self, session: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            await self._bound(session, self._draws[BOUNDED].choice(LIMITS))
            await asyncio.sleep(CHANGE_S)

    async def _bound(self, session: aiohttp.ClientSession, limit: int) -> bool:
        begin = time.monotonic()
        accepted = await self._write(session, self.writers[2], {"max_concurrency": limit})
        self.judge.record_limit(limit, begin, time.monotonic() if accepted else None)
        return accepted

    async def _write_on(self, session: aiohttp.ClientSession, until: float, writer: Writer) -> None:
        """The other writer's field, and what this one does not state, must stay as they are."""
        draw = self._draws[TUNED]
        while time.monotonic() < until:
            more = {"reserved_concurrency": draw.choice([None, 1, 2])} if writer.field == "idle_ttl" else {}
            await self._write(session, writer, more)
            await asyncio.sleep(draw.uniform(0.1, CHANGE_S / 2))

    async def _write(self, session: aiohttp.ClientSession, writer: Writer, more: dict[str, Any]) -> bool:
        writer.number += 1
        self.counts["writes"] += 1
        accepted = await self._patch(session, writer.function, {writer.field: writer.number, **more})
        if accepted:
            writer.acknowledged = writer.number
            self.counts["writes_acknowledged"] += 1
        return accepted

    async def _change_copies(self, session: aiohttp.ClientSession, until: float) -> None:
        """Refused while a node is away: two copies need two."""
        draw = self._draws[KEPT]
        while time.monotonic() < until:
            await self._patch(session, KEPT, {"provisioned": draw.choice([COPIES, {"device": 1}, {"host": 1}, None])})
            await asyncio.sleep(COPIES_S)

    async def _patch(self, session: aiohttp.ClientSession, name: str, policy: dict[str, Any]) -> bool:
        """Returns whether it was acknowledged."""
        try:
            async with session.patch(f"{self._service.url}/functions/{name}", json=policy) as reply:
                await reply.read()
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    # --- who calls

    async def _call_on(self, session: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            await self._call(session, BOUNDED)
            await asyncio.sleep(CALL_S)

    async def _call_idled(self, session: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            await self._call(session, IDLED)
            await asyncio.sleep(IDLE_CALL_S)

    async def _call(self, session: aiohttp.ClientSession, name: str) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        sent, first, event = time.monotonic(), 0.0, ""
        try:
            async with session.post(f"{self._service.url}/invoke/{name}", json=body) as reply:
                if reply.status != 200:
                    return
                async for event, data in read_events(reply.content):  # noqa: B007  (the last one is read below)
                    first = first or time.monotonic()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        if event == "done" and name == BOUNDED:
            self.counts["bounded_calls"] += 1
            self.judge.record_call(sent, first, json.loads(data)["timing"]["total_ms"] / 1000)

    # --- what became of it

    def check(self, redis_harms: Sequence[tuple[float, float]]) -> Counter[str]:
        """Waits until all is as the policies say, BACK_S at most. Returns what is wrong, of WRONG. `redis_harms`: when
        Redis was harmed, from and to (monotonic seconds)."""
        over, over_twice = self.judge.over(redis_harms)
        wrong = Counter(over_max_concurrency=over, over_twice_max_concurrency=over_twice)
        with self._service.client() as client, self._service.client(admin=True) as operator:
            wrong += self._still_missing(client, operator, time.monotonic() + BACK_S)
            policies = {
                name: client.get(f"/functions/{name}").raise_for_status().json()["policy"] for name in FUNCTIONS
            }
        wrong["writes_lost"] = sum(not writer.is_kept(policies[writer.function]) for writer in self.writers)
        return wrong

    def _still_missing(self, client: httpx.Client, operator: httpx.Client, deadline: float) -> Counter[str]:
        """Has `kept` provisioned, and returns what is then not as it has to be; nothing as soon as all is."""
        is_set = False
        while True:
            is_set = is_set or client.patch(f"/functions/{KEPT}", json={"provisioned": COPIES}).status_code == 200
            missing = self._missing(client, operator)
            if (is_set and not missing.total()) or time.monotonic() > deadline:
                return missing
            time.sleep(0.5)

    def _missing(self, client: httpx.Client, operator: httpx.Client) -> Counter[str]:
        """Returns what is not as it has to be in the end."""
        functions = {name: client.get(f"/functions/{name}").raise_for_status().json() for name in FUNCTIONS}
        digests = {name: function["versions"][-1]["digest"] for name, function in functions.items()}
        tiers = [_tiers(operator, node["record"]["id"]) for node in operator.get("/nodes").json()["nodes"]]
        tiers_of_kept = sorted(
            tier for each in tiers if (tier := each.get(digests[KEPT], "absent")) in ("device", "host")
        )
        idle = sum(each.get(digests[IDLED], "absent") in ("device", "host") for each in tiers)
        policies = {name: parse_policy(function["policy"], Policy()) for name, function in functions.items()}
        return Counter(
            copies_missing=0 if len(tiers_of_kept) >= 2 and "device" in tiers_of_kept else 1,
            idle_kept=idle,
            books_wrong=_books_wrong(self._service.root / ".garnish" / "registry", policies),
        )


def _tiers(operator: httpx.Client, node: str) -> dict[str, str]:
    """Returns the tiers of a node's adapters, by digest; none of a node that does not answer."""
    reply = operator.get(f"/nodes/{node}/adapters")
    return {each["digest"]: each["tier"] for each in reply.json()["adapters"]} if reply.status_code == 200 else {}


def _books_wrong(registry: Path, policies: dict[str, Policy]) -> int:
    entries = read_standing(open_store(str(registry))).functions
    by_function = {name: entries.get(f"{TENANT}/{name}") for name in policies}
    return sum(
        (entry is not None) != stands_in(policies[name]) or (entry is not None and not entry.matches(policies[name]))
        for name, entry in by_function.items()
    )


class _Limit(NamedTuple):
    value: int
    sent: float
    acknowledged: float | None


class _Call(NamedTuple):
    sent: float
    first: float
    end: float


class ConcurrencyJudge:
    """All times in monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._limits: list[_Limit] = []
        self._calls: list[_Call] = []

    def record_limit(self, value: int, sent: float, acknowledged: float | None) -> None:
        """A limit was set; None: nobody knows whether."""
        self._limits.append(_Limit(value, sent, acknowledged))

    def record_call(self, sent: float, first: float, seconds: float) -> None:
        """A call was done. `first`: when its first token came; `seconds`: that it took, as the service says."""
        self._calls.append(_Call(sent, first, sent + seconds))

    def over(self, away: Sequence[tuple[float, float]]) -> tuple[int, int]:
        """Returns the number of calls that were admitted over the limit, and over twice the limit.

        The second counts while the workers' shared count was not in order (`away`: begin and end): then each of two
        workers admits its half, whatever ran before.
        """
        over = over_twice = 0
        for call in self._calls:
            concurrent = sum(running.first <= call.sent and running.end >= call.first for running in self._calls)
            limit = self._max_limit(call.sent, call.first)
            is_away = any(begin <= call.first and call.sent <= end + AWAY_S for begin, end in away)
            over += not is_away and concurrent + 1 > limit
            over_twice += concurrent + 1 > 2 * limit
        return over, over_twice

    def _max_limit(self, begin: float, end: float) -> int:
        """Returns the highest limit that may have been in force at some time between."""
        past = [
            at for at, each in enumerate(self._limits) if each.acknowledged and each.acknowledged + STALE_S <= begin
        ]
        first = past[-1] if past else 0
        return max(each.value for each in self._limits[first:] if each.sent <= end)
