"""State of the nodes that several gateway workers share in Redis.

Scripts in Redis decide whether a record is newer and whether a place is free, by Redis's clock. Every change has a
version and is published to all workers, each of which keeps a mirror. Reading the table thus needs no round trip, and a
reservation needs one. A worker that misses a version reads the full state again.

While Redis is away the mirror is all that a worker has. Records do not age then (RedisLink.report_clock), since
none could arrive. Places are reserved in this worker alone.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Unpack

import msgspec

from cluster.messages import check_version
from cluster.news import ABSENT_TIER, FULL_REPORT, Changes, Facts, Heartbeat, NodeReport, Resident
from cluster.node_book import PAST_EPOCHS, TooManyNodes
from cluster.node_table import Demand
from cluster.queue_shares import room_for_others
from cluster.redis_link import OutOfStep, RedisAway, RedisLink, Value
from cluster.state import ClusterState, PublishResult, StateSettings

CATCH_UP_SECONDS = 0.1
"""Maximum time to wait for a change that Redis has already published."""
AWAY_SECONDS = 1.0
"""Seconds that a reservation lasts while Redis is away. Such a place has no number, so it ends only when its time is
over. The node's next record should count the request before that."""
CHANGES = "changes"


class _Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """A published report of a node. The Redis script that publishes it puts its parts together."""

    heartbeat: Heartbeat
    facts: Facts | None
    changes: Changes

    @property
    def node(self) -> str:
        return self.heartbeat.id


class _Reserved(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    node: str
    request: str
    demand: Demand


class _Freed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    node: str
    request: str


_decoder = msgspec.msgpack.Decoder(_Put | _Reserved | _Freed)
_heartbeats, _facts = msgspec.msgpack.Decoder(Heartbeat), msgspec.msgpack.Decoder(Facts)
_residents = msgspec.msgpack.Decoder(Resident)
_encode = msgspec.msgpack.Encoder().encode


class RedisClusterState(ClusterState):
    """State of the nodes in Redis, with a mirror in this process. `link` must not be running yet: from its start on it
    keeps the mirror up to date."""

    def __init__(self, link: RedisLink, **settings: Unpack[StateSettings]) -> None:
        super().__init__(link.clock, link.report_clock, **settings)
        self._link = link
        self._version = 0
        self._ahead: dict[str, int] = {}
        """Version of this worker's latest reservation on each node, until its message arrives."""
        self._version_risen = asyncio.Event()
        """Event that is set when the version rises, and then replaced by a new one."""
        self._version_before = 0
        """Redis's version at the last heartbeat."""
        link.on_message[CHANGES] = self._changed
        link.on_resume.append(self._resume)
        link.on_heartbeat.append(self._check_version)

    @property
    def stale(self) -> float | None:
        since = self._link.away_since
        return None if since is None else self._clock() - since

    async def publish(self, news: NodeReport) -> PublishResult:
        check_version(news.heartbeat.v)
        self._book.forget(self._report_clock())
        try:
            status, version = await self._publish(news, 0.0)
        except RedisAway:
            return self._publish_here(news)
        if status == -1:
            raise TooManyNodes(f"{self._book.max_nodes} nodes are known already; {news.heartbeat.id} was not added")
        if status == 1:
            await self._catch_up(version)
            return "taken"
        return "older" if status == 0 else "gap"

    async def reserve(
        self, node_id: str, request_id: str, demand: Demand, expected_generation: int | None
    ) -> int | None:
        try:
            return await self._reserved(node_id, request_id, demand, expected_generation)
        except RedisAway:
            seconds = min(AWAY_SECONDS, self._reservation_seconds)
            is_reserved = await self._reserve_here(
                node_id, request_id, demand, expected_generation, seconds=seconds, number=0
            )
            return 0 if is_reserved else None
        except asyncio.CancelledError:  # the place, if Redis has reserved one, will not be used
            await self._free(node_id, request_id)
            raise

    async def _reserved(
        self, node_id: str, request_id: str, demand: Demand, expected_generation: int | None
    ) -> int | None:
        """Reserves a place in Redis, after restoring a node there that Redis has lost. Returns the place's number, or
        None as `reserve` does. Raises RedisAway."""
        for restored in (False, True):
            status, version, generation, number = await self._reserve(node_id, request_id, demand, expected_generation)
            if status > 0:
                if version > self._version:  # otherwise its message has already arrived
                    self._hold_ahead(_Reserved(node_id, request_id, demand), version, generation, number)
                return number
            if status == 0:
                await self._catch_up(version)
                return None
            if restored or not await self._restore(node_id):
                return None
            expected_generation = None  # Redis had lost the generation
        return None

    async def release(self, node_id: str, request_id: str) -> None:
        if self._book.drop(node_id, request_id):  # otherwise it was acknowledged, in most cases
            await self._free(node_id, request_id)

    async def _free(self, node_id: str, request_id: str) -> None:
        payload = msgspec.msgpack.encode(_Freed(node_id, request_id))
        try:
            await self._link.run("release", self._keys(node_id), [request_id, payload, self._channel])
        except RedisAway:
            return  # the reservation expires

    # --- requests to Redis

    @property
    def _channel(self) -> str:
        return self._link.key(CHANGES)

    @property
    def _longest_silence_ms(self) -> int:
        """Returns the milliseconds without a report after which Redis treats a node as silent. It is the lesser of the
        record's expiry and `forget_seconds`."""
        return round(min(self._expiry, self._book.forget_seconds) * 1000)

    def _keys(self, node_id: str) -> list[str]:
        key = self._link.key
        return [key("node", node_id), key("ends", node_id), key("demands", node_id), key("version")]

    async def _publish(self, news: NodeReport, age: float, *, resuming: bool = False) -> tuple[int, int]:
        heartbeat, changes = news.heartbeat, news.changes
        record = self._book.record(heartbeat.id)
        limit = news.facts.queue_limit if news.facts else record.queue_limit if record else 0
        args: list[Value] = [
            heartbeat.id,
            heartbeat.epoch,
            heartbeat.seq,
            _encode(heartbeat),
            _encode(news.facts),
            _encode(changes),
            heartbeat.queued,
            limit,
            round(age * 1000),
            self._channel,
            self._book.max_nodes,
            round(self._book.forget_seconds * 1000),
            PAST_EPOCHS,
            changes.since,
            changes.at,
            heartbeat.received.last,
            heartbeat.received.bits,
            self._longest_silence_ms,
        ]
        for resident in changes.residents:
            args += [resident.digest, b"" if resident.tier == ABSENT_TIER else _encode(resident)]
        keys = [self._link.key("nodes"), *self._keys(heartbeat.id), self._link.key("residents", heartbeat.id)]
        run = self._link.catch_up_run if resuming else self._link.run
        status, version = await run("publish", keys, args)
        return status, version

    async def _reserve(
        self, node_id: str, request_id: str, demand: Demand, expected_generation: int | None
    ) -> tuple[int, int, int, int]:
        """Runs the script `reserve`, and returns (status, version, generation, number of the place). The status is 1
        (reserved), 0 (refused) or -1 (unknown node). Raises RedisAway."""
        payload = msgspec.msgpack.encode(_Reserved(node_id, request_id, demand))
        record = self._book.record(node_id)
        room = room_for_others(record.queue_limit) if record is not None and demand.displaces else 0
        args: list[Value] = [
            request_id,
            payload,
            "" if expected_generation is None else expected_generation,
            self._longest_silence_ms,
        ]
        args += [round(self._reservation_seconds * 1000), self._channel, room]
        status, version, generation, number = await self._link.run("reserve", self._keys(node_id), args)
        return status, version, generation, number

    async def _restore(self, node_id: str, *, resuming: bool = False) -> bool:
        """Restores in Redis a node that it has lost. Returns False, and changes nothing, when the mirror has no live
        record of it. Raises RedisAway."""
        age = self._report_clock() - self._book.last_seen(node_id)
        if self._book.record(node_id) is None or age >= self._expiry:
            return False
        await self._publish(self._book.full_report(node_id), max(0.0, age), resuming=resuming)
        return True

    # --- updates of the mirror

    def _changed(self, message: bytes) -> None:
        version_text, generation, number, payload = message.split(b":", 3)
        version = int(version_text)
        if version <= self._version:
            return  # the snapshot already had this change
        if version != self._version + 1:
            raise OutOfStep(f"version {version} follows {self._version}")
        self._version = version
        change = _decoder.decode(payload)
        is_newest = version >= self._ahead.get(change.node, 0)  # otherwise older than this worker's reservation
        if is_newest:
            self._ahead.pop(change.node, None)
        self._apply(change, self._reservation_end(), int(number), int(generation) if is_newest else None)
        self._wake()

    def _apply(self, change: _Put | _Reserved | _Freed, end: float, number: int, generation: int | None = None) -> None:
        """Applies a change to this worker's book. `generation` is the node's generation after the change; None leaves
        it unchanged."""
        after = self._book.generation(change.node) if generation is None else generation
        match change:
            case _Put(heartbeat, facts, changes):
                self._put(NodeReport(heartbeat, facts, changes), self._report_clock())
            case _Reserved(node, request, demand):
                self._book.hold(node, request, demand, end, number)
            case _Freed(node, request):
                self._book.drop(node, request)
        self._book.set_generation(change.node, after)

    def _hold_ahead(self, place: _Reserved, version: int, generation: int, number: int) -> None:
        """Applies this worker's own reservation before its message arrives. Answers to reservations may arrive out of
        order."""
        is_newest = version > self._ahead.get(place.node, 0)
        if is_newest:
            self._ahead[place.node] = version
        self._apply(place, self._reservation_end(), number, generation if is_newest else None)

    def _reservation_end(self) -> float:
        return self._clock() + self._reservation_seconds

    def _put(self, news: NodeReport, last_seen: float) -> None:
        """Applies a report that Redis has accepted to the book. A full book first drops the node that was seen longest
        ago, which Redis has forgotten already. Raises OutOfStep."""
        if self._book.needs_full_report(news):
            raise OutOfStep(f"a change of node {news.heartbeat.id} was missed")
        if self._book.record(news.heartbeat.id) is None and len(self._book.ids()) >= self._book.max_nodes:
            self._book.remove(min(self._book.ids(), key=self._book.last_seen))
        self._book.put(news, last_seen)

    async def _resume(self) -> None:
        """Reads the full state from Redis. Restores in Redis the nodes that it lost and this worker still has. Raises
        RedisAway."""
        key = self._link.key
        begins = [key("node", ""), key("ends", ""), key("demands", ""), key("residents", "")]
        version, *nodes = await self._link.catch_up_run("snapshot", [key("nodes"), key("version")], begins)
        there = set()
        for heartbeat_bytes, facts, at, age, generation, reserved, residents in nodes:
            heartbeat = _heartbeats.decode(heartbeat_bytes)
            there.add(heartbeat.id)
            changes = Changes(FULL_REPORT, at, [_residents.decode(resident) for resident in residents])
            self._put(NodeReport(heartbeat, _facts.decode(facts), changes), self._report_clock() - age / 1000)
            self._book.drop_all(heartbeat.id)
            for remaining_ms, stored in zip(reserved[::2], reserved[1::2], strict=True):
                number, place = stored.split(b":", 1)
                seconds = min(remaining_ms / 1000, self._reservation_seconds)
                self._apply(_decoder.decode(place), self._clock() + seconds, int(number))
            self._book.set_generation(heartbeat.id, generation)
            await asyncio.sleep(0)  # many nodes with many adapters take long: lets other tasks run
        self._version = self._version_before = version
        self._ahead.clear()
        self._wake()
        for node_id in [name for name in self._book.ids() if name not in there]:
            await self._restore(node_id, resuming=True)

    def _check_version(self, version: int) -> None:
        """Compares Redis's version with this worker's at a heartbeat. Raises OutOfStep when this worker has not reached
        the version that Redis had at the previous heartbeat. Also raises OutOfStep when Redis's version fell, which
        happens only when Redis is emptied."""
        before, self._version_before = self._version_before, version
        if self._version < before or version < before or version == 0 < self._version:
            raise OutOfStep(f"Redis is at version {version}, this worker at {self._version}")

    async def _catch_up(self, version: int) -> None:
        """Waits until the mirror has reached this version, for CATCH_UP_SECONDS at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_SECONDS):
                while version > self._version:
                    await self._version_risen.wait()

    def _wake(self) -> None:
        self._version_risen.set()
        self._version_risen = asyncio.Event()
