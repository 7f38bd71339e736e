"""A simulated link between memory tiers: it delays transfers and never changes data."""

from __future__ import annotations

import threading
import time

from node_agent.config import LinkConfig


class Link:
    """Transfers share the bandwidth in order of arrival. Without a config it costs nothing."""

    def __init__(self, config: LinkConfig | None) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._busy_until = 0.0

    def carry(self, size: int) -> None:
        """Returns when `size` bytes would have arrived."""
        if self._config is None:
            return
        with self._lock:
            now = time.monotonic()
            self._busy_until = max(now, self._busy_until) + size / self._config.bandwidth
            arrival = self._busy_until + self._config.latency
        time.sleep(max(0.0, arrival - now))
