"""A real store with a clock that tests set forward, gateways over it that may die at any of their writes, and what is
known of each event from outside."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import StoreUnavailable
from adapters.functions import Policy
from adapters.local_store import LocalStore
from adapters.store import MAX_LIST, Object, ObjectInfo
from adapters.tenants import Tenant
from cluster.errors import ServiceError
from gateway.api import schema
from gateway.catalog.threads import StoreThreads
from gateway.events.deliveries import Deliveries
from gateway.events.event_store import EventStore
from gateway.events.events import Events, make_channel
from gateway.events.jobs import release_lost
from gateway.events.records import ENDED, EventRecord, markers_of, new_nonce, parse_marker
from gateway.events.webhooks import HostsOf, Webhooks
from gateway.events.worker import Worker
from gateway.leader.tick import Tick
from gateway.places.places import Places, Pool
from gateway.webhook_hosts import WebhookHosts, parse_webhook_hosts

RESULT = schema.InvokeReply(
    id="inv_0",
    function="pirate",
    version=1,
    digest="0" * 64,
    output=schema.Output(text="Arr", finish_reason="stop"),
    usage=schema.Usage(1, 1, 0),
    timing=schema.Timing(0.0, schema.ColdStartTiming("none", "wait", 0.0, 0.0), 1.0, None, 1.0),
)


@dataclass
class World:
    """What all gateways of a test share."""

    folder: Path
    ahead: float = 0.0
    """By which the store's clock is set forward; seconds."""
    written: dict[str, float] = field(default_factory=dict)
    """When each object was written last, by the store's clock."""
    ends: Counter[str] = field(default_factory=Counter)
    """How often each event came to its end, by its key."""
    runs: Counter[str] = field(default_factory=Counter)
    """How often each event was executed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self, dies_at: float = float("inf"), after: bool = False) -> MortalStore:
        return MortalStore(self, dies_at, after)

    def pass_time(self, seconds: float) -> None:
        self.ahead += seconds

    def recover(self) -> int:
        """What the leader does once those who died have been silent for long enough."""
        self.pass_time(120)
        tick = Tick(math.inf, lambda: 0.0, lambda: True)
        release_lost(EventStore(self.store()), tick)
        return tick.work


class MortalStore(LocalStore):
    """A gateway's way to the store. From its `dies_at`th write on, nothing comes through any more; with `after` that
    write itself still does, and only its answer is lost."""

    def __init__(self, world: World, dies_at: float, after: bool) -> None:
        super().__init__(world.folder)
        self.world, self.dies_at, self.after = world, dies_at, after
        self.writes = 0
        self.dead = threading.Event()

    def now(self) -> float:
        return super().now() + self.world.ahead

    def get(self, key: str) -> Object:
        self._check()
        return super().get(key)

    def list(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[ObjectInfo]:
        self._check()
        return [
            msgspec.structs.replace(info, modified=self.world.written[info.key])
            for info in super().list(prefix, after, limit)
        ]

    def put(self, key: str, data: bytes | Path) -> str:
        return self._write(key, lambda: super(MortalStore, self).put(key, data))

    def put_if_absent(self, key: str, data: bytes | Path) -> str:
        return self._write(key, lambda: super(MortalStore, self).put_if_absent(key, data))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        was = self.get(key).data

        def put() -> str:
            new = super(MortalStore, self).put_if_match(key, data, etag)
            self._note_end(key, was, data)  # also where only the answer is lost
            return new

        return self._write(key, put)

    def delete(self, key: str) -> None:
        self._write(key, lambda: super(MortalStore, self).delete(key))

    def _note_end(self, key: str, was: bytes, now: bytes) -> None:
        """Called under the world's lock."""
        states = [msgspec.json.decode(data).get("state", "queued") for data in (was, now)]
        if states[0] not in ENDED and states[1] in ENDED:
            self.world.ends[key] += 1

    def _check(self) -> None:
        if self.dead.is_set():
            raise StoreUnavailable("this gateway is dead")

    def _write(self, key: str, write: Callable[[], Any]) -> Any:
        with self.world.lock:
            self._check()
            self.writes += 1
            if self.writes >= self.dies_at:
                self.dead.set()
                if not self.after:
                    raise StoreUnavailable("this gateway is dead")
            self.world.written[key] = self.now()
            done = write()
        self._check()
        return done


def places(size: int, per_tenant: int) -> Places:
    return Places(Pool(name="p", work="deliveries", size=size, per_tenant=per_tenant))


def webhooks_to(hosts_of: HostsOf) -> Webhooks:
    return Webhooks(hosts_of, places(16, 4), places(8, 2))


async def no_hosts(_tenant: str) -> WebhookHosts:
    return parse_webhook_hosts(())


def open_events(store: LocalStore, **options: Any) -> Events:
    defaults: dict[str, Any] = {"account_of": default_account}
    return Events(EventStore(store), StoreThreads(10.0, 4), make_channel(None), **(defaults | options))


async def default_account(tenant: str) -> Tenant:
    return Tenant(id=tenant)


def new_event(number: int, now: float, tenant: str = "acme", **fields: Any) -> EventRecord:
    defaults: dict[str, Any] = {"retries": 2, "deadline": now + 3600, "request": {"prompt": "Once"}}
    defaults["function"] = "pirate"
    return EventRecord(
        id=f"inv_{number:04d}", tenant=tenant, created=now, changed=now, due=now, nonce=new_nonce(),
        **(defaults | fields),
    )  # fmt: skip


def make_worker(world: World, events: Events, failing: Callable[[str, int], ServiceError | None]) -> Worker:
    """`failing`: what an execution of an event, by its id and number, fails with."""

    async def execute(event: EventRecord) -> schema.InvokeReply:
        world.runs[event.id] += 1
        await asyncio.sleep(0.002)
        error = failing(event.id, world.runs[event.id])
        if error is not None:
            raise error
        return msgspec.structs.replace(RESULT, id=event.id)

    deliveries = Deliveries(events, webhooks_to(no_hosts), no_policy, places(16, 4))
    return Worker(events, execute, deliveries, always, places(32, 31))


async def always() -> bool:
    return True


async def no_policy(_tenant: str, _name: str, _qualifier: str | None) -> Policy:
    return Policy()


async def all_ended(events: Events, ids: Sequence[str], tenant: str = "acme") -> list[EventRecord]:
    while True:
        found = [await events.get(tenant, event_id) for event_id in ids]
        if all(event.state in ENDED for event in found):
            return found
        await asyncio.sleep(0.02)


def leftovers(store: MortalStore) -> set[str]:
    """Returns the keys of markers that belong to no event, or to one that says otherwise."""
    found = set()
    for info in store.list("events/"):
        marker = parse_marker(info.key)
        if marker is None:
            continue
        stored = EventStore(store).find(marker.tenant, marker.id)
        if stored is None or info.key not in markers_of(stored.record):
            found.add(info.key)
    return found


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


async def add_some(events: Events, count: int, tenant: str = "acme", first: int = 0) -> list[str]:
    now = await events.clock.now()
    added = [await events.add(new_event(first + number, now, tenant)) for number in range(count)]
    return [event.id for event in added]
