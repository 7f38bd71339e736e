"""Cluster state that several gateway workers share, in Redis.

Scripts in Redis decide (is a record newer, is a place free), by Redis's clock. Every change has a version and is told
to all workers, each of which keeps a mirror; so the table needs no round trip, and a reservation one. A worker that
misses a version asks for the whole again.

While Redis is away the mirror is all there is: records do not grow old (RedisLink.aged), since none could have come,
and places are reserved in this worker alone.
"""

from __future__ import annotations

import asyncio

import msgspec

from cluster.crowd import room_for_others
from cluster.messages import RECORD_EXPIRY, NodeRecord, check_version
from cluster.node_book import FORGET_SECONDS, PAST_EPOCHS, NodeBook, NodeView
from cluster.node_table import Demand, NodeTable
from cluster.redis_link import OutOfStep, RedisAway, RedisLink, Value
from cluster.state import MAX_NODES, RESERVATION_SECONDS, TooManyNodes, reserve_in

CATCH_UP_SECONDS = 0.1
"""Longest wait for a change that Redis has told already."""
CHANGES = "changes"


class _Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    record: NodeRecord


class _Held(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    node: str
    request: str
    demand: Demand


class _Freed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    node: str
    request: str


_decoder = msgspec.msgpack.Decoder(_Put | _Held | _Freed)


class RedisClusterState:
    """`link` must not run yet: it keeps the mirror up to date from its start on."""

    def __init__(
        self,
        link: RedisLink,
        *,
        expiry: float = RECORD_EXPIRY,
        reservation_seconds: float = RESERVATION_SECONDS,
        max_nodes: int = MAX_NODES,
        forget_seconds: float = FORGET_SECONDS,
    ) -> None:
        self._link = link
        self._clock, self._aged = link.clock, link.aged
        self._expiry, self._reservation_seconds = expiry, reservation_seconds
        self._book = NodeBook(expiry=expiry, max_nodes=max_nodes, forget_seconds=forget_seconds)
        self._version = 0
        self._ahead: dict[str, int] = {}
        """The version of our own latest reservation on a node, as long as its message is still to come."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._beaten = 0
        link.on_message[CHANGES] = self._changed
        link.on_resume.append(self._resume)
        link.on_beat.append(self._check_version)

    @property
    def stale(self) -> float | None:
        since = self._link.away_since
        return None if since is None else self._clock() - since

    async def publish(self, record: NodeRecord) -> bool:
        check_version(record.v)
        self._book.forget(self._aged())
        try:
            taken, version = await self._publish(record, 0.0)
        except RedisAway:
            return self._publish_here(record)
        if taken < 0:
            raise TooManyNodes(f"{self._book.max_nodes} nodes are known already; {record.id} was not added")
        if taken:
            await self._catch_up(version)
        return taken > 0

    async def table(self) -> NodeTable:
        return self._book.current(self._clock(), self._aged())

    async def nodes(self) -> list[NodeView]:
        return self._book.views(self._clock(), self._aged())

    async def reserve(self, node_id: str, request_id: str, demand: Demand, seen: int | None) -> bool:
        try:
            return await self._reserved(node_id, request_id, demand, seen)
        except RedisAway:
            return reserve_in(self._book, await self.table(), node_id, request_id, demand, seen, self._end())
        except asyncio.CancelledError:  # nobody will use the place, if Redis has given one
            await self._free(node_id, request_id)
            raise

    async def _reserved(self, node_id: str, request_id: str, demand: Demand, seen: int | None) -> bool:
        """Raises RedisAway."""
        for restored in (False, True):
            taken, version, generation = await self._reserve(node_id, request_id, demand, seen)
            if taken > 0:
                if version > self._version:  # else its message has come already
                    self._hold_ahead(_Held(node_id, request_id, demand), version, generation)
                return True
            if taken == 0:
                await self._catch_up(version)
                return False
            if restored or not await self._restore(node_id):
                return False
            seen = None  # Redis had lost its count
        return False

    async def release(self, node_id: str, request_id: str) -> None:
        if not self._book.is_held(node_id, request_id):
            return  # acknowledged, in most cases
        self._book.drop(node_id, request_id)
        await self._free(node_id, request_id)

    async def _free(self, node_id: str, request_id: str) -> None:
        payload = msgspec.msgpack.encode(_Freed(node_id, request_id))
        try:
            await self._link.run("release", self._keys(node_id), [request_id, payload, self._channel])
        except RedisAway:
            return  # it ends by itself

    async def silence(self, node_id: str, epoch: str) -> float:
        return self._book.silence(node_id, epoch, self._aged())

    # --- what Redis is asked

    @property
    def _channel(self) -> str:
        return self._link.key(CHANGES)

    def _keys(self, node_id: str) -> list[str]:
        key = self._link.key
        return [key("node", node_id), key("ends", node_id), key("demands", node_id), key("version")]

    async def _publish(self, record: NodeRecord, age: float, *, resuming: bool = False) -> tuple[int, int]:
        payload = msgspec.msgpack.encode(_Put(record))
        own: list[Value] = [record.id, record.epoch, record.seq, payload, record.queued, record.queue_limit]
        bounds: list[Value] = [
            round(age * 1000),
            self._channel,
            self._book.max_nodes,
            round(self._book.forget_seconds * 1000),
            PAST_EPOCHS,
        ]
        keys = [self._link.key("nodes"), *self._keys(record.id)]
        run = self._link.catch_up_run if resuming else self._link.run
        taken, version = await run("publish", keys, [*own, *bounds, *record.acknowledged])
        return taken, version

    async def _reserve(self, node_id: str, request_id: str, demand: Demand, seen: int | None) -> tuple[int, int, int]:
        """What the script returns. Raises RedisAway."""
        payload = msgspec.msgpack.encode(_Held(node_id, request_id, demand))
        expiry = round(min(self._expiry, self._book.forget_seconds) * 1000)  # a node that is forgotten is not there
        known = "" if seen is None else seen
        record = self._book.known(node_id)
        room = room_for_others(record.queue_limit) if record is not None and demand.displaces else 0
        args: list[Value] = [request_id, payload, known, expiry]
        args += [round(self._reservation_seconds * 1000), self._channel, room]
        taken, version, generation = await self._link.run("reserve", self._keys(node_id), args)
        return taken, version, generation

    async def _restore(self, node_id: str, *, resuming: bool = False) -> bool:
        """Give Redis a node back that it has lost; whether there was one to give. Raises RedisAway."""
        record = self._book.known(node_id)
        age = self._aged() - self._book.heard(node_id)
        if record is None or age >= self._expiry:
            return False
        await self._publish(record, max(0.0, age), resuming=resuming)
        return True

    # --- what keeps the mirror in step

    def _changed(self, message: bytes) -> None:
        version_text, generation, payload = message.split(b":", 2)
        version = int(version_text)
        if version <= self._version:
            return  # it was in the snapshot
        if version != self._version + 1:
            raise OutOfStep(f"version {version} follows {self._version}")
        self._version = version
        change = _decoder.decode(payload)
        node_id = change.record.id if isinstance(change, _Put) else change.node
        counted = self._book.generation(node_id)
        self._apply(change, self._end())
        if version >= self._ahead.get(node_id, 0):  # else it tells of a time before our own latest reservation
            self._ahead.pop(node_id, None)
            counted = int(generation)
        self._book.set_generation(node_id, counted)
        self._wake()

    def _apply(self, change: _Put | _Held | _Freed, end: float) -> None:
        match change:
            case _Put(record):
                self._put(record, self._aged())
            case _Held(node, request, demand):
                self._book.hold(node, request, demand, end)
            case _Freed(node, request):
                self._book.drop(node, request)

    def _hold_ahead(self, held: _Held, version: int, generation: int) -> None:
        """A place of our own, before its message comes; answers to reservations may come in another order."""
        counted, latest = self._book.generation(held.node), self._ahead.get(held.node, 0)
        self._apply(held, self._end())
        if version > latest:
            self._ahead[held.node] = version
            counted = generation
        self._book.set_generation(held.node, counted)

    def _end(self) -> float:
        return self._clock() + self._reservation_seconds

    def _put(self, record: NodeRecord, heard: float) -> None:
        """Redis has taken it in, so there is room for it once those are forgotten that Redis has forgotten."""
        if self._book.known(record.id) is None and len(self._book.ids()) >= self._book.max_nodes:
            self._book.remove(min(self._book.ids(), key=self._book.heard))
        self._book.put(record, heard)

    async def _resume(self) -> None:
        """Everything anew from Redis; what Redis lost and we still know, it gets back. Raises RedisAway."""
        key = self._link.key
        begins = [key("node", ""), key("ends", ""), key("demands", "")]
        version, *nodes = await self._link.catch_up_run("snapshot", [key("nodes"), key("version")], begins)
        there = set()
        for payload, age, generation, held in nodes:
            record = _decoder.decode(payload).record
            there.add(record.id)
            self._put(record, self._aged() - age / 1000)
            self._book.drop_all(record.id)
            for left, place in zip(held[::2], held[1::2], strict=True):
                seconds = min(left / 1000, self._reservation_seconds)
                self._apply(_decoder.decode(place), self._clock() + seconds)
            self._book.set_generation(record.id, generation)
        self._version = self._beaten = version
        self._ahead.clear()
        self._wake()
        for node_id in [name for name in self._book.ids() if name not in there]:
            await self._restore(node_id, resuming=True)

    def _check_version(self, version: int) -> None:
        """Every beat. What the one before told must have come by now, and there is no way back but to be emptied."""
        lost = self._version < self._beaten or version < self._beaten or version == 0 < self._version
        self._beaten = version
        if lost:
            raise OutOfStep(f"Redis is at version {version}, this worker at {self._version}")

    async def _catch_up(self, version: int) -> None:
        """Returns when the mirror has this version, or soon."""
        if version <= self._version:
            return
        told = asyncio.get_running_loop().create_future()
        self._waiting.append((version, told))
        await asyncio.wait([told], timeout=CATCH_UP_SECONDS)
        told.cancel()

    def _wake(self) -> None:
        for version, told in self._waiting:
            if version <= self._version and not told.done():
                told.set_result(None)
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]

    def _publish_here(self, record: NodeRecord) -> bool:
        if not self._book.is_newer(record):
            return False
        self._book.put(record, self._aged())
        return True
