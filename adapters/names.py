"""Rules for names that users type: functions, tenants and aliases; and for digests."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?", re.ASCII)
NAME_RULE = "1 to 64 of a-z, 0-9, '.', '_' and '-', starting and ending with a letter or digit"
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def is_name(text: str) -> bool:
    """Returns whether `text` is a valid name of a function, a tenant or (unless all digits) an alias."""
    return NAME.fullmatch(text) is not None


def is_alias(text: str) -> bool:
    """Returns whether `text` is a valid alias: a name that can't be mistaken for a version number."""
    return is_name(text) and not text.isdigit()
