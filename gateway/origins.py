"""Checks the origins whose pages may call the gateway from a browser (`cors_origins`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9.-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?", re.ASCII)


def check_origins(origins: Sequence[str], *, has_keys: bool) -> None:
    """Checks the setting `cors_origins`. Raises ValueError. `has_keys`: whether calls need a key."""
    for origin in origins:
        if origin != ANY and not ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} is not an origin; expected such as https://app.example or http://localhost:3000, in lower "
                "case and without a path, or '*'"
            )
    if ANY in origins and not has_keys:
        raise ValueError("'*' needs `auth: keys`: without keys any page that a user opens could use this service")
