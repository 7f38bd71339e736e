"""Sizes of pools elsewhere, noted on this host, so that a later `garnish infra plan` does not undo them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra.autoscale.driver import PoolDriver, PoolSize
from infra.autoscale.sizes import SetSize, set_size


class NotedDriver:
    """A driver's sizes, with each that was set noted beside Terraform's state. `stated`: `desired` in the file now."""

    def __init__(self, driver: PoolDriver, directory: Path, stated: Callable[[str], int]) -> None:
        self._driver, self._directory, self._stated = driver, directory, stated

    def size(self, pool: str) -> PoolSize:
        return self._driver.size(pool)

    def set_desired(self, pool: str, size: int) -> None:
        self._driver.set_desired(pool, size)
        set_size(self._directory, pool, SetSize(size, self._stated(pool)))
