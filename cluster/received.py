"""Record of which reserved places of a node have been used: their requests have arrived there.

Places are numbered in the order in which they are reserved. A node reports the highest number that it has received. For
the WINDOW numbers up to it, the node also reports which ones have arrived. A place with a lower number counts as used:
its request has arrived, or never will.
"""

from __future__ import annotations

import msgspec

WINDOW = 256
_MASK = (1 << WINDOW) - 1


class Received(msgspec.Struct, frozen=True, array_like=True):
    """Set of the numbers of places whose requests have arrived at a node."""

    last: int = 0
    bits: bytes = b""
    """Bit mask as a big-endian number: bit i is set if place `last` - i has arrived."""

    def has(self, number: int) -> bool:
        """Returns whether the place of this number need no longer be reserved. Returns False for 0, a place without a
        number."""
        age = self.last - number
        return number > 0 and (age >= WINDOW or (age >= 0 and bool(int.from_bytes(self.bits) >> age & 1)))

    def with_one(self, number: int) -> Received:
        """Returns this record with the place of this number added."""
        age, bits = self.last - number, int.from_bytes(self.bits)
        if number <= 0:
            return self
        if not 0 <= age < WINDOW:  # far ahead, or from a gateway that restarted its count
            bits = bits << -age & _MASK if -WINDOW < age < 0 else 0
            return Received(number, _bytes(bits | 1))
        return Received(self.last, _bytes(bits | 1 << age))


def _bytes(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8)
