"""The command line, the loader of serverless.yml and the Python client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from garnish.client import AsyncClient as AsyncClient
    from garnish.client import Client as Client
    from garnish.errors import GarnishError as GarnishError

__all__ = ["AsyncClient", "Client", "GarnishError"]


def __getattr__(name: str) -> object:
    """Imports `Client`, `AsyncClient` or `GarnishError` at its first use, so that `import garnish` is fast."""
    if name in ("AsyncClient", "Client"):
        import garnish.client

        return getattr(garnish.client, name)
    if name == "GarnishError":
        from garnish.errors import GarnishError

        return GarnishError
    raise AttributeError(f"module 'garnish' has no attribute {name!r}")
