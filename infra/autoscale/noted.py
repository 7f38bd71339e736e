"""Sizes of pools elsewhere, noted on this host, so that a later `garnish infra plan` does not undo them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra.autoscale.driver import PoolDriver, PoolSize
from infra.autoscale.sizes import SetSize, read_sizes, set_size


class NotedDriver:
    """Does what `driver` does, with each size that was set noted beside Terraform's state. `stated` returns `desired`
    of a pool in the file now."""

    def __init__(self, driver: PoolDriver, directory: Path, stated: Callable[[str], int]) -> None:
        self._driver, self._directory, self._stated = driver, directory, stated

    def size(self, pool: str) -> PoolSize:
        """Returns the driver's size. A note that tells another size is mended: whoever set that one had no time left to
        note it."""
        known, noted = self._driver.size(pool), read_sizes(self._directory).get(pool)
        if noted is not None and noted.size != known.desired and noted.stated == self._stated(pool):
            set_size(self._directory, pool, SetSize(known.desired, noted.stated))
        return known

    def set_desired(self, pool: str, size: int) -> None:
        self._driver.set_desired(pool, size)
        set_size(self._directory, pool, SetSize(size, self._stated(pool)))
