"""Reserved places of a node that have become requests there.

Places are numbered in the order in which they are reserved. A node reports the last number that it has received, and
for the WINDOW before it which ones came; what is older has come, or never will.
"""

from __future__ import annotations

import msgspec

WINDOW = 256
_MASK = (1 << WINDOW) - 1


class Received(msgspec.Struct, frozen=True, array_like=True):
    last: int = 0
    bits: bytes = b""
    """A big-endian number: its bit i says whether `last` - i came."""

    def has(self, number: int) -> bool:
        """Returns whether the place of this number is held no longer; one without a number (0) ends by itself."""
        age = self.last - number
        return number > 0 and (age >= WINDOW or (age >= 0 and bool(int.from_bytes(self.bits) >> age & 1)))

    def with_one(self, number: int) -> Received:
        """Returns what has been received once the request with this number came."""
        age, bits = self.last - number, int.from_bytes(self.bits)
        if number <= 0:
            return self
        if not 0 <= age < WINDOW:  # far ahead, or of a gateway that counts anew
            bits = bits << -age & _MASK if -WINDOW < age < 0 else 0
            return Received(number, _bytes(bits | 1))
        return Received(self.last, _bytes(bits | 1 << age))


def _bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8)
