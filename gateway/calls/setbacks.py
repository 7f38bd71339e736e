"""Pauses of tenants' programs (chat templates, forms of answers) whose process had to be killed, so that calls do not
start them again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

FIRST_PAUSE_S = 2.0
"""Pause after the first kill in seconds. It doubles with each further one."""
MAX_PAUSE_S = 60.0
MAX_REMEMBERED = 4096
"""Maximum programs that are remembered; the one that was killed first is forgotten."""

Key = tuple[str, bytes]
"""Tenant, and digest of the program: programs are too long to be kept."""


class _Setback(NamedTuple):
    kills: int
    until: float
    why: str


def key_of(tenant: str, program: str) -> Key:
    return tenant, hashlib.sha256(program.encode(errors="surrogatepass")).digest()


class Setbacks:
    """Programs that were killed lately, by tenant. Thread-safe. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._setbacks: dict[Key, _Setback] = {}

    def pause(self, key: Key) -> tuple[float, str] | None:
        """Returns the seconds for which the program is not tried, and why it was killed. Returns None if it may be
        tried."""
        with self._lock:
            setback = self._setbacks.get(key)
        if setback is None or (seconds := setback.until - self._clock()) <= 0:
            return None
        return seconds, setback.why

    def record_kill(self, key: Key, why: str) -> None:
        with self._lock:
            before = self._setbacks.pop(key, None)
            kills = 1 if before is None else before.kills + 1
            seconds = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(kills - 1, 16))
            self._setbacks[key] = _Setback(kills, self._clock() + seconds, why)
            if len(self._setbacks) > MAX_REMEMBERED:
                del self._setbacks[next(iter(self._setbacks))]

    def record_success(self, key: Key) -> None:
        """Takes back one kill: a program that is killed by every other job keeps its pauses."""
        with self._lock:
            before = self._setbacks.get(key)
            if before is not None and before.kills > 1:
                self._setbacks[key] = before._replace(kills=before.kills - 1)
            elif before is not None:
                del self._setbacks[key]
