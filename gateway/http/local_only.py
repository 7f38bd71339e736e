"""Without keys, any web page in a browser on this host could call the gateway: only local addresses and pages may."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.requests import Request

from cluster.errors import ServiceError
from gateway.config import is_loopback


def check_local(request: Request, bound_host: str) -> None:
    """Raises ServiceError `forbidden` for what a page of another site can make a browser send.

    A browser names the page's site in `Origin` with everything but plain reads, and can't read the replies to those;
    where a site's name was made to point to this host (DNS rebinding), `Host` still has that name.
    """
    host = request.headers.get("host")
    if host is not None and not _is_local(host, bound_host):
        raise ServiceError(
            "forbidden", "while `auth` is `none`, only loopback addresses are served: Host names another"
        )
    for origin in request.headers.getlist("origin"):
        if host is None or origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            raise ServiceError("forbidden", "while `auth` is `none`, pages of other sites may not call: see Origin")


def _is_local(host: str, bound_host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and (is_loopback(name) or name == bound_host.lower())
