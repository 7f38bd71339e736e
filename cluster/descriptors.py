"""File descriptors of this process: raises their limit, and says when they run short.

Connections take most of them. Once few are left, servers close idle connections, and those that have not shown a key
(cluster.http_protocol), so that a caller without a key cannot keep others out.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time

ENOUGH = 65_536
"""Number of descriptors to which the soft limit is raised at the start, as in the systemd units."""
FEW = 4096
"""Limit below which a start logs a warning."""
MAX_RESERVE = 1024
"""Maximum number of descriptors that are kept for other things than new connections."""
LOG_SECONDS = 60.0
"""Minimum seconds between two log lines about a shortage."""
PROC = "/proc/self/fd"

log = logging.getLogger(__name__)


def raise_limit() -> int:
    """Raises the soft limit of descriptors to ENOUGH, or to the hard limit if that is lower. Returns the limit.

    Logs a warning if the limit stays below FEW.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of file descriptors can't be raised", extra={"limit": soft, "reason": str(error)})
    limit = current_limit()
    if limit < FEW:
        log.warning(
            "few file descriptors: raise the hard limit (LimitNOFILE in systemd, ulimit -Hn in a shell)",
            extra={"limit": limit, "target": ENOUGH},
        )
    return limit


def current_limit() -> int:
    """Returns the soft limit of this process's descriptors."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def is_out_of_descriptors(error: OSError) -> bool:
    """Returns whether this process or host had no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def _count_open() -> int:
    """Returns the number of this process's open descriptors; of the soft limit, if none is left to count them with."""
    try:
        return len(os.listdir(PROC))
    except OSError:
        return current_limit()


class Descriptors:
    """Count of the descriptors that new connections may still take.

    Counting the open ones takes long when they are many, so they are counted again only after half of the free ones may
    have been taken. A connection may take two: a call has another connection to its node.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.reserve = min(MAX_RESERVE, limit // 4)
        """Number of descriptors that are kept for other things than new connections."""
        self._uncounted = 0
        """Number of connections or requests that may begin before the next count."""
        self._logged_at = -LOG_SECONDS
        self._closed = self._refused = 0

    def shortage(self) -> int:
        """Records that a connection or a request begins. Returns how many descriptors are missing from the reserve; 0
        if none is."""
        if self._uncounted > 0:
            self._uncounted -= 1
            return 0
        free = self._limit - _count_open()
        self._uncounted = max(0, (free - self.reserve) // 2)
        return max(0, self.reserve - free)

    def is_scarce(self, shortage: int) -> bool:
        """Returns whether so large a shortage refuses requests: more than half of the reserve is used."""
        return shortage > self.reserve // 2

    def record(self, closed: int, refused: int = 0) -> None:
        """Counts closed connections and refused requests, and logs them every LOG_SECONDS at most."""
        self._closed, self._refused, now = self._closed + closed, self._refused + refused, time.monotonic()
        if (self._closed or self._refused) and now - self._logged_at >= LOG_SECONDS:
            extra = {"limit": self._limit, "closed": self._closed, "refused": self._refused}
            log.warning("file descriptors run short: idle connections and those without a key are closed", extra=extra)
            self._logged_at, self._closed, self._refused = now, 0, 0
