"""The sizes that the autoscaler has set, in `sizes.json` next to Terraform's state of this host.

`garnish infra plan` and `apply` use them instead of `desired` in serverless.yml, so that neither undoes a size of the
autoscaler. An edit of `desired` wins: a size that was set for another value of it no longer counts.
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
    """`desired` in serverless.yml at that time"""
    draining: list[str] = []


def read_sizes(directory: Path) -> dict[str, SetSize]:
    """Returns the sizes that the autoscaler has set, by pool.

    Raises InfraError for a file that can't be read, since continuing without it would undo these sizes.
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
    """Writes the size of one pool. Raises InfraError. Only the autoscaler that leads may call it."""
    sizes = read_sizes(directory)
    if sizes.get(pool) != size:
        write_sizes(directory, {**sizes, pool: size})


def delete_sizes(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


def effective_size(set_size: SetSize | None, stated: int, min_size: int, max_size: int) -> int:
    """Returns the size that the autoscaler set, within the bounds; `stated` if `desired` was edited since, or none."""
    if set_size is None or set_size.stated != stated:
        return stated
    return max(min_size, min(set_size.size, max_size))


class RecordingDriver:
    """Wraps a driver, and records each size that it sets next to Terraform's state.

    `stated` returns the present `desired` of a pool in the service file.
    """

    def __init__(self, driver: PoolDriver, directory: Path, stated: Callable[[str], int]) -> None:
        self._driver, self._directory, self._stated = driver, directory, stated

    def size(self, pool: str) -> PoolSize:
        """Returns the driver's size, and corrects a record that differs, left by an interrupted autoscaler."""
        current, recorded = self._driver.size(pool), read_sizes(self._directory).get(pool)
        if recorded is not None and recorded.size != current.desired and recorded.stated == self._stated(pool):
            set_size(self._directory, pool, SetSize(current.desired, recorded.stated))
        return current

    def set_desired(self, pool: str, size: int) -> None:
        self._driver.set_desired(pool, size)
        set_size(self._directory, pool, SetSize(size, self._stated(pool)))
