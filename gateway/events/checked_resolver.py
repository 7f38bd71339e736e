"""Resolves webhooks' hosts to allowed addresses alone.

Apart from the rules: the command line loads those, and would load aiohttp with them.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

from aiohttp.abc import AbstractResolver, ResolveResult

from gateway.webhook_hosts import WebhookHosts

RESOLVE_S = 5.0
MAX_ADDRESSES = 8
"""Of one host, that are checked and tried."""


class CheckedResolver(AbstractResolver):
    """Resolves a host to addresses that were checked: the connection goes to one of these."""

    def __init__(self, allowed: WebhookHosts) -> None:
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises NotAllowed if any of the host's addresses is not allowed, OSError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results: list[ResolveResult] = []
        for kind, _, protocol, _, place in found[:MAX_ADDRESSES]:
            self._allowed.check_address(ip_address(str(place[0]).partition("%")[0]))
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(place[0]),
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        return results

    async def close(self) -> None:
        return None
