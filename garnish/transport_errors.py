"""What went wrong between a client and the service, in words that say what to do."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from garnish.errors import GarnishError


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Raises httpx's failures as GarnishError: what was not reached at `url`, and what to do about it."""
    try:
        yield
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        problem = f"not a service's address: {url!r} (expected one such as http://127.0.0.1:8080)"
        raise GarnishError("unreachable", problem) from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if isinstance(error.__context__, ssl.SSLError) or "SSL" in str(error):
            problem = f"{url} can't be reached by TLS: {error}; does it speak http, without s?"
        else:
            problem = (
                f"nothing answers at {url}: is it started? garnish up (or name another address: --url, GARNISH_URL)"
            )
        raise GarnishError("unreachable", problem) from error
    except httpx.TimeoutException as error:
        raise GarnishError("unreachable", f"{url} did not answer in time ({type(error).__name__})") from error
    except httpx.RemoteProtocolError as error:
        problem = f"the connection to {url} broke off, or no Garnish service answers there: {error}"
        raise GarnishError("unreachable", problem) from error
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise GarnishError("unreachable", f"{url} can't be reached: {reason}") from error
