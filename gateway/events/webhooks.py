"""Sends webhooks in the format of the Standard Webhooks specification. Webhooks are signed, limited in size and time,
and follow no redirects."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from standardwebhooks import Webhook

from gateway.catalog.threads import LeavableThreads
from gateway.events.webhook_secrets import WebhookSecret
from gateway.places.places import Places
from gateway.webhook_hosts import NotAllowed, WebhookHosts

SEND_S = 15.0
"""Timeout of one try in seconds, from the resolution of the host to the status of the reply."""
RESOLVE_S = 5.0
MAX_ADDRESSES = 8


class NotDelivered(Exception):
    """A try of a delivery has failed. The event's owner may read the text. `for_good`: True if no later try can
    succeed."""

    def __init__(self, why: str, *, for_good: bool = False) -> None:
        super().__init__(why)
        self.for_good = for_good


HostsOf = Callable[[str], Awaitable[WebhookHosts]]
"""Function that returns the allowed hosts of a tenant's webhooks. Raises StoreUnavailable."""


class Webhooks:
    """Sender of webhooks of one worker. Callers of `send` hold one of `places`. `names`: places for look-ups of hosts,
    each in a thread."""

    def __init__(self, hosts_of: HostsOf, places: Places, names: Places) -> None:
        self.places = places
        self._hosts_of = hosts_of
        self._names = LeavableThreads(names)

    async def send(self, tenant: str, url: str, message_id: str, body: bytes, secrets: Sequence[WebhookSecret]) -> None:
        """Posts a signed message to the tenant's URL.

        Raises NotDelivered unless the receiver answers 2xx, StoreUnavailable.
        """
        if not secrets:
            raise NotDelivered("the tenant has no webhook secret any more")
        allowed = await self._hosts_of(tenant)
        try:
            allowed.check_url(url)
            async with asyncio.timeout(SEND_S), _session(allowed, self._names) as session:
                request = session.post(url, data=body, headers=signed(message_id, body, secrets), allow_redirects=False)
                async with request as reply:
                    status = reply.status
        except NotAllowed as error:
            raise NotDelivered(str(error)) from None
        except TimeoutError:
            raise NotDelivered(f"no answer within {SEND_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = error.__cause__ or error
            problem = str(cause) if isinstance(cause, NotAllowed) else "the host can't be reached"
            raise NotDelivered(problem) from None
        if not 200 <= status < 300:
            raise NotDelivered(f"the receiver answered {status}")


def signed(message_id: str, body: bytes, secrets: Sequence[WebhookSecret]) -> dict[str, str]:
    """Returns the headers of a message with the current time, and a signature by each valid secret."""
    now = datetime.now(UTC)
    text = body.decode()
    signatures = [Webhook(each.secret).sign(message_id, now, text) for each in secrets]
    return {
        "content-type": "application/json",
        "user-agent": "garnish-webhooks",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(signatures),
    }


def _session(allowed: WebhookHosts, names: LeavableThreads) -> aiohttp.ClientSession:
    """Returns a session for one webhook. Allowed hosts differ by tenant, so connections are not reused."""
    connector = aiohttp.TCPConnector(resolver=CheckedResolver(allowed, names), use_dns_cache=False, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)


class CheckedResolver(AbstractResolver):
    """Resolver that returns only allowed addresses. The connection is made to these, so the check can't be bypassed.

    A tenant's slow name server holds a thread of `names`, and none that other parts of the gateway use.
    """

    def __init__(self, allowed: WebhookHosts, names: LeavableThreads) -> None:
        self._allowed, self._names = allowed, names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Returns the addresses of a host. Raises NotAllowed if any of them is not allowed, and OSError."""
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(RESOLVE_S):
                infos = await self._names.run(look_up)
        except TimeoutError:
            raise OSError(f"the host's name was not resolved within {RESOLVE_S:g} s") from None
        for *_, place in infos[:MAX_ADDRESSES]:
            self._allowed.check_address(ip_address(str(place[0]).partition("%")[0]))
        flags = socket.AI_NUMERICHOST
        return [
            ResolveResult(hostname=host, host=str(place[0]), port=port, family=kind, proto=protocol, flags=flags)
            for kind, _, protocol, _, place in infos[:MAX_ADDRESSES]
        ]

    async def close(self) -> None:
        return None
