"""Publishes the node's state to the gateway at each interval: totals, and changes since the last acknowledged
message."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
import msgspec

from cluster.news import FULL_REPORT, RECORD_INTERVAL
from cluster.secret import authorization
from node_agent.api.requests import RequestRegistry

POST_SECONDS = 1.0
"""Timeout of a report of changes, in seconds. After a longer time the report would be outdated."""
WHOLE_SECONDS = 5.0
"""Timeout of a full report, in seconds. It is longer, since many nodes send full reports at once after a gateway's
start. If they retried too early, the gateway would never finish."""

log = logging.getLogger(__name__)


class Publisher:
    """Posts reports on the node's state to one gateway until cancelled. Retries an unreachable gateway forever."""

    def __init__(
        self, registry: RequestRegistry, gateway_url: str, secret: str, interval: float = RECORD_INTERVAL
    ) -> None:
        self._registry = registry
        self._url = gateway_url.rstrip("/") + "/cluster/record"
        self._headers = {**authorization(secret), "content-type": "application/msgpack"}
        self._interval = interval
        self._is_accepted: bool | None = None
        self._acknowledged = FULL_REPORT

    async def run(self) -> None:
        async with aiohttp.ClientSession(headers=self._headers) as session:
            while True:
                next_at = time.monotonic() + self._interval
                await self._post(session)
                await asyncio.sleep(max(next_at - time.monotonic(), self._interval / 4))

    async def _post(self, session: aiohttp.ClientSession) -> None:
        news, problem = self._registry.news(self._acknowledged), None
        timeout = aiohttp.ClientTimeout(total=WHOLE_SECONDS if news.changes.since == FULL_REPORT else POST_SECONDS)
        try:
            async with session.post(self._url, data=msgspec.msgpack.encode(news), timeout=timeout) as response:
                if response.status == 204:
                    self._acknowledged = news.changes.at
                elif response.status == 200:  # FullReportRequest: it lacks the state that these changes build on
                    self._acknowledged = FULL_REPORT
                else:
                    problem = f"the gateway answered {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._heard_of(problem)

    def _heard_of(self, problem: str | None) -> None:
        """Logs when the gateway starts or stops accepting reports, but not each attempt. `problem`: reason of a failed
        attempt; None: success."""
        is_accepted = problem is None
        if is_accepted != self._is_accepted:
            self._is_accepted = is_accepted
            if is_accepted:
                log.info("gateway hears us", extra={"url": self._url})
            else:
                log.warning("gateway does not hear us", extra={"url": self._url, "reason": problem})
