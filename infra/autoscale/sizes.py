"""Reads and writes `sizes.json`, the sizes set by the autoscaler. The file is next to this host's Terraform state.

`garnish infra plan` and `apply` use these sizes instead of `desired` in serverless.yml, so that they do not undo a
change by the autoscaler. After an edit of `desired` the recorded size is ignored and `desired` is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from infra.autoscale.driver import PoolDriver, PoolSize
from infra.errors import InfraError
from infra.text import write_atomically

FILE = "sizes.json"


class SetSize(msgspec.Struct, frozen=True):
    size: int
    stated: int
    """`desired` in serverless.yml when the size was set"""
    draining: list[str] = []


def read_sizes(directory: Path) -> dict[str, SetSize]:
    """Returns the sizes set by the autoscaler, by pool; empty if there is no file.

    Raises InfraError for a file that can't be read, since continuing without it would undo these sizes.
    """
    file = directory / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, SetSize])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise InfraError(
            f"{file} can't be read ({error}): it holds the sizes that the autoscaler has set; repair it, or delete it "
            "to return to `desired` of serverless.yml"
        ) from error


def write_sizes(directory: Path, sizes: dict[str, SetSize]) -> None:
    """Writes the sizes set by the autoscaler, by pool. Raises InfraError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(sizes, order="sorted")).decode()
        write_atomically(directory / FILE, text)
    except OSError as error:
        raise InfraError(f"{error.filename or directory}: {error.strerror}") from error


def set_size(directory: Path, pool: str, size: SetSize) -> None:
    """Writes the size of one pool. Only the autoscaler that holds the lease may call this. Raises InfraError."""
    sizes = read_sizes(directory)
    if sizes.get(pool) != size:
        write_sizes(directory, {**sizes, pool: size})


def delete_sizes(directory: Path) -> None:
    (directory / FILE).unlink(missing_ok=True)


def effective_size(set_size: SetSize | None, stated: int, min_size: int, max_size: int) -> int:
    """Returns the size set by the autoscaler, limited to the bounds.

    Returns `stated`, the service file's `desired`, if `desired` was edited since, or if no size was set.
    """
    if set_size is None or set_size.stated != stated:
        return stated
    return max(min_size, min(set_size.size, max_size))


class RecordingDriver:
    """Wraps a driver, and records each size that is set in `sizes.json`.

    `stated` returns the current `desired` of a pool in the service file.
    """

    def __init__(self, driver: PoolDriver, directory: Path, stated: Callable[[str], int]) -> None:
        self._driver, self._directory, self._stated = driver, directory, stated

    def size(self, pool: str) -> PoolSize:
        """Returns the driver's size, and corrects the size in `sizes.json` if it differs from the driver's.

        An interrupted autoscaler can leave a wrong size there.
        """
        current, recorded = self._driver.size(pool), read_sizes(self._directory).get(pool)
        if recorded is not None and recorded.size != current.desired and recorded.stated == self._stated(pool):
            set_size(self._directory, pool, SetSize(current.desired, recorded.stated))
        return current

    def set_desired(self, pool: str, size: int) -> None:
        self._driver.set_desired(pool, size)
        set_size(self._directory, pool, SetSize(size, self._stated(pool)))
