"""What a policy may know of the request that it places."""

from __future__ import annotations

import msgspec


class PlacementRequest(msgspec.Struct, frozen=True):
    id: str
    prompt_tokens: int
    max_tokens: int
    digest: str | None
    """Adapter version; None for the base alone."""
    adapter_bytes: int
