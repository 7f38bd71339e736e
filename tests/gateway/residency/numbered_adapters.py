"""Adapters that are told apart by a number, for tests that load none."""

from __future__ import annotations

import hashlib

from cluster.messages import Adapter

DIGESTS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(200)]


def adapter(number: int, size: int = 1000) -> Adapter:
    return Adapter(DIGESTS[number], f"artifacts/{number}", size, (8,))
