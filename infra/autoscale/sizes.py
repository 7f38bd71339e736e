"""The sizes that the autoscaler has set, kept beside Terraform's state of this host: `sizes.json`.

`garnish infra plan` and `apply` take them instead of `desired` in serverless.yml, so that neither undoes what the
autoscaler did. Who then edits `desired` means it: a size that was set while the file said something else counts no
more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from infra.autoscale.driver import PoolDriver, PoolSize
from infra.errors import InfraError
from infra.text import write_whole

FILE = "sizes.json"


class SetSize(msgspec.Struct, frozen=True):
    size: int
    stated: int
    """`desired` in serverless.yml at that time."""
    draining: list[str] = []
    """Nodes that are drained because the pool is to become smaller."""


def read_sizes(directory: Path) -> dict[str, SetSize]:
    """Returns the sizes that the autoscaler has set, by pool; {} where it has set none.

    Raises InfraError for a file that can't be read: to go on without it would undo what it says.
    """
    file = directory / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, SetSize])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise InfraError(
            f"{file} can't be read ({error}): it holds the sizes that the autoscaler has set; mend it, or delete it to "
            "return to `desired` of serverless.yml"
        ) from error


def write_sizes(directory: Path, sizes: dict[str, SetSize]) -> None:
    """Writes the sizes that the autoscaler has set, by pool. Raises InfraError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(sizes, order="sorted")).decode()
        write_whole(directory / FILE, text)
    except OSError as error:
        raise InfraError(f"{error.filename or directory}: {error.strerror}") from error


def set_size(directory: Path, pool: str, size: SetSize) -> None:
    """Sets one pool's size among those that the autoscaler has set. Raises InfraError. For the only autoscaler: nobody
    else writes."""
    known = read_sizes(directory)
    if known.get(pool) != size:
        write_sizes(directory, {**known, pool: size})


def forget_sizes(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


def in_force(set_size: SetSize | None, stated: int, least: int, most: int) -> int:
    """Returns the size that counts: the one that was set, within the bounds `least` and `most`, unless `desired` was
    edited since; then, and where none was set, `stated`."""
    if set_size is None or set_size.stated != stated:
        return stated
    return max(least, min(set_size.size, most))


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
