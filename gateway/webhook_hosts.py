"""Allowed destinations of webhooks: hosts by name, and public addresses. Private networks must be listed explicitly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address
NAT64 = IPv6Network("64:ff9b::/96")
"""Prefix of IPv6 addresses that embed an IPv4 address, to which a NAT64 gateway translates."""
UNICAST = IPv6Network("2000::/3")
"""Range of all assigned public IPv6 addresses; Python treats some others as public, too."""


class NotAllowed(OSError):
    """A webhook's host or address is not allowed. An OSError, as aiohttp expects of resolvers."""


@dataclass(frozen=True)
class WebhookHosts:
    """Allowed hosts of webhooks. `hosts`: names; `*.` before a domain means all its subdomains. `networks`: allowed
    networks, which may be private."""

    hosts: frozenset[str]
    networks: tuple[Network, ...]

    def check_url(self, url: str) -> None:
        """Checks the host of a URL, without resolving it. Raises NotAllowed."""
        host = (urlsplit(url).hostname or "").rstrip(".")
        address = as_address(host)
        if address is not None:
            self.check_address(address)
            if not any(address in network for network in self.networks):
                raise NotAllowed(f"webhooks to {host} are not allowed here")
        elif host not in self.hosts and not any(f"*.{parent}" in self.hosts for parent in _parents(host)):
            raise NotAllowed(f"webhooks to {host} are not allowed here; the operator lists hosts in webhook_hosts")

    def check_address(self, address: Address) -> None:
        """Checks an address. Raises NotAllowed if it is not public, and in no allowed network."""
        reached = _reached(address)
        allowed = any(each in network for each in (address, reached) for network in self.networks)
        if not allowed and not _is_public(reached):
            raise NotAllowed("the webhook's host has an address that is not public")


def parse_webhook_hosts(entries: Sequence[str]) -> WebhookHosts:
    """Parses host names, `*.domain`, addresses, and networks such as 10.1.0.0/16. Raises ValueError."""
    hosts: set[str] = set()
    networks: list[Network] = []
    for entry in entries:
        if "/" in entry or as_address(entry) is not None:
            networks.append(ip_network(entry))
        elif not entry or not all(part.replace("-", "a").isalnum() for part in entry.removeprefix("*.").split(".")):
            raise ValueError(f"{entry!r} is not a host, *.domain, address or network")
        elif not entry.isascii():  # URLs of webhooks are ASCII, so it would match none
            raise ValueError(f"{entry!r} is not ASCII: write the host as in a URL, xn--…")
        else:
            hosts.add(entry.lower())
    return WebhookHosts(frozenset(hosts), tuple(networks))


def as_address(text: str) -> Address | None:
    """Returns the text as an IP address; None if it is not one."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def _reached(address: Address) -> Address:
    """Returns the IPv4 address that an IPv6 address embeds, if it does; else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_public(address: Address) -> bool:
    unicast = isinstance(address, IPv4Address) or address in UNICAST
    return unicast and address.is_global and not address.is_multicast


def _parents(host: str) -> list[str]:
    parts = host.split(".")
    return [".".join(parts[at:]) for at in range(1, len(parts))]
