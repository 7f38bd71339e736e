"""Text from other parties, made safe for a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Returns the text with control characters replaced, except for tabs and line breaks. Control characters could move
    the cursor, or rename the terminal window."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
