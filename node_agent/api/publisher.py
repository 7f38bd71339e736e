"""Publishes the node's state to the gateway at every interval: sums, and what changed since the last message."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
import msgspec

from cluster.news import RECORD_INTERVAL, WHOLE
from cluster.secret import authorization
from node_agent.api.requests import RequestRegistry

POST_SECONDS = 1.0
"""A gateway that takes longer counts as away; the record would be old by then."""
WHOLE_SECONDS = 5.0
"""Limit in seconds for a full report of what the node holds. Many nodes send one at once after a gateway's start: sent
again before the gateway has taken them in, they would never come to an end."""

log = logging.getLogger(__name__)


class Publisher:
    """Posts the registry's news to one gateway until cancelled. A gateway that is away is tried again for ever."""

    def __init__(
        self, registry: RequestRegistry, gateway_url: str, secret: str, interval: float = RECORD_INTERVAL
    ) -> None:
        self._registry = registry
        self._url = gateway_url.rstrip("/") + "/cluster/record"
        self._headers = {**authorization(secret), "content-type": "application/msgpack"}
        self._interval = interval
        self._is_accepted: bool | None = None
        self._acknowledged = WHOLE

    async def run(self) -> None:
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while True:
                next_at = time.monotonic() + self._interval
                await self._post(session)
                await asyncio.sleep(max(next_at - time.monotonic(), self._interval / 4))

    async def _post(self, session: aiohttp.ClientSession) -> None:
        news, problem = self._registry.news(self._acknowledged), None
        timeout = aiohttp.ClientTimeout(total=WHOLE_SECONDS if news.changes.since == WHOLE else POST_SECONDS)
        try:
            async with session.post(self._url, data=msgspec.msgpack.encode(news), timeout=timeout) as response:
                if response.status == 204:
                    self._acknowledged = news.changes.at
                elif response.status == 200:  # FullReportRequest: it has lost what these build on, or never had it
                    self._acknowledged = WHOLE
                else:
                    problem = f"the gateway answered {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._heard_of(problem)

    def _heard_of(self, problem: str | None) -> None:
        """Logs a change of whether the gateway hears us, not every attempt. `problem`: why it does not; None: it
        does."""
        is_accepted = problem is None
        if is_accepted != self._is_accepted:
            self._is_accepted = is_accepted
            if is_accepted:
                log.info("gateway hears us", extra={"url": self._url})
            else:
                log.warning("gateway does not hear us", extra={"url": self._url, "reason": problem})
