"""Tells the gateway how this node is: at every interval and soon after a change."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from cluster.messages import RECORD_INTERVAL
from cluster.secret import authorization
from node_agent.api_desk import Desk

MIN_GAP = 0.02
"""Seconds between two records, however much changes."""
POST_SECONDS = 1.0
"""A gateway that takes longer counts as away; the record would be old by then."""

log = logging.getLogger(__name__)


class Publisher:
    """Posts the desk's record to one gateway until it is cancelled. A gateway that is away is tried again for ever."""

    def __init__(self, desk: Desk, gateway_url: str, secret: str, interval: float = RECORD_INTERVAL) -> None:
        self._desk = desk
        self._url = gateway_url.rstrip("/") + "/cluster/record"
        self._headers = {**authorization(secret), "content-type": "application/msgpack"}
        self._interval = interval
        self._heard: bool | None = None

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=POST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            while True:
                self._desk.changed.clear()
                await self._post(session)
                await asyncio.sleep(MIN_GAP)
                try:
                    async with asyncio.timeout(self._interval - MIN_GAP):
                        await self._desk.changed.wait()
                except TimeoutError:
                    continue  # nothing changed: the regular record is due

    async def _post(self, session: aiohttp.ClientSession) -> None:
        record = self._desk.record()
        try:
            async with session.post(self._url, data=msgspec.msgpack.encode(record)) as response:
                problem = None if response.status == 204 else f"the gateway answered {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            self._desk.forget_acknowledged(record.acknowledged)
        self._note(problem)

    def _note(self, problem: str | None) -> None:
        """Logs when it changes whether the gateway hears us, not at every attempt."""
        heard = problem is None
        if heard != self._heard:
            self._heard = heard
            if heard:
                log.info("gateway hears us", extra={"url": self._url})
            else:
                log.warning("gateway does not hear us", extra={"url": self._url, "reason": problem})
