"""Text of others on a person's terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Returns the text with its control characters replaced, but for tabs and line breaks: they could move the cursor
    or rename the window."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
