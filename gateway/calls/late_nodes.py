"""Asks nodes whose record is late, before a call is refused because no node is ready, or a node is taken for dead.

On a busy host a record may come too late although its node serves. A node that answers has its new record published, as
if the node had reported it, and takes calls again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from cluster.errors import ServiceError
from cluster.messages import VersionMismatch
from cluster.news import NodeRecord, NodeReport
from cluster.node_book import TooManyNodes
from cluster.node_table import NodeTable
from cluster.record_check import BadRecord, check_news
from cluster.redis_link import RedisAway
from cluster.state import ClusterState
from gateway.calls.node_calls import NodeCalls
from gateway.calls.scale_from_zero import serving

ASK_SECONDS = 3.0
"""Maximum seconds for which a call waits for the answers of late nodes."""
PAUSE_SECONDS = 1.0
"""Seconds after which a node that did not answer may be asked again. Meanwhile calls are refused at once."""
MAX_REQUESTED = 16

log = logging.getLogger("gateway")


class LateNodes:
    """Nodes whose record has expired, as far as they have not been forgotten. `clock`: monotonic seconds."""

    def __init__(self, state: ClusterState, node_calls: NodeCalls, base: str, clock: Callable[[], float]) -> None:
        self._state, self._node_calls, self._base, self._clock = state, node_calls, base, clock
        self._requested: dict[str, asyncio.Task[None]] = {}
        """Questions without an answer so far, by node. All calls wait for the same ones."""
        self._silent_until: dict[str, float] = {}

    async def find(self, excluded: Collection[str] = (), seconds: float = ASK_SECONDS) -> bool:
        """Asks the late nodes that are not in `excluded`. Returns True as soon as one of them is ready to serve the
        base model, and False if none is after `seconds`."""
        nodes = await self._state.table()
        if serving(nodes, self._base, excluded):
            return True
        until = self._clock() + min(seconds, ASK_SECONDS)
        pending = self._ask_all(self._late(nodes, excluded))
        while pending and (remaining := until - self._clock()) > 0:
            _, pending = await asyncio.wait(pending, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if serving(await self._state.table(), self._base, excluded):
                return True
        return False

    async def ask(self, node_id: str) -> None:
        """Asks a node for its record, unless it is being asked or did not answer just now. Does not wait for the
        answer."""
        nodes = await self._state.table()
        if (row := nodes.row(node_id)) is not None:
            self._ask_all([nodes.record(row)])

    def _late(self, nodes: NodeTable, excluded: Collection[str]) -> list[NodeRecord]:
        """Returns the records of nodes that may serve the base model, but whose record has expired; the latest
        first."""
        rows = sorted((row for row in nodes.rows() if not nodes.live[row]), key=lambda row: -nodes.last_seen[row])
        records = [nodes.record(row) for row in rows]
        return [
            record
            for record in records
            if record.state != "draining" and record.base in (self._base, "") and record.id not in excluded
        ]

    def _ask_all(self, records: list[NodeRecord]) -> set[asyncio.Task[None]]:
        """Returns the questions to these nodes, without those nodes that did not answer just now."""
        now = self._clock()
        self._silent_until = {node_id: until for node_id, until in self._silent_until.items() if until > now}
        for record in records:
            if (
                record.id not in self._requested
                and record.id not in self._silent_until
                and len(self._requested) < MAX_REQUESTED
            ):
                self._requested[record.id] = asyncio.create_task(self._ask(record))
        return {self._requested[record.id] for record in records if record.id in self._requested}

    async def _ask(self, record: NodeRecord) -> None:
        """Asks one node for its record, and publishes that. Logs the reason if the node can't be asked."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                _, report = await self._node_calls.ask(record, "/record", NodeReport)
            if report.heartbeat.id != record.id:
                raise BadRecord(f"id: another node answered, {report.heartbeat.id[:60]!r}")
            check_news(report, urlsplit(record.url).hostname or "", ())
            await self._state.publish(report)
            log.info(
                "a node whose record is late has answered", extra={"node": record.id, "state": report.heartbeat.state}
            )
        except (ServiceError, BadRecord, VersionMismatch, TooManyNodes, RedisAway, TimeoutError) as error:
            self._silent_until[record.id] = self._clock() + PAUSE_SECONDS
            reason = str(error) or type(error).__name__
            log.info("a node whose record is late does not answer", extra={"node": record.id, "reason": reason})
        finally:
            del self._requested[record.id]
