"""Table of the recently called functions: one row per function, in columns owned by the predictors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FIRST_ROOM = 1024
"""Initial number of rows in each column. It doubles as needed, up to the table's limit."""


class Column:
    """Column of a FunctionTable: a value or a small array per function. The table moves, resets and grows it."""

    def __init__(self, table: FunctionTable, room: int, shape: tuple[int, ...], fill: float, dtype: type) -> None:
        self._table = table
        self._fill = fill
        self._values: Array = np.full((room, *shape), fill, dtype)

    @property
    def live(self) -> Array:
        """View of the rows in use, valid until functions enter or leave the table."""
        return self._values[: len(self._table)]

    @property
    def bytes(self) -> int:
        """Memory of the column in bytes, including unused rows."""
        return int(self._values.nbytes)

    def grow(self, room: int) -> None:
        """Enlarges the column to `room` rows, and fills the new ones. Does nothing if it is already that large."""
        if room > len(self._values):
            larger = np.full((room, *self._values.shape[1:]), self._fill, self._values.dtype)
            larger[: len(self._values)] = self._values
            self._values = larger

    def move(self, source: Array, target: Array) -> None:
        """Copies the values of rows `source` to rows `target`."""
        self._values[target] = self._values[source]

    def reset(self, begin: int, end: int) -> None:
        """Sets rows `begin` to `end` - 1 to the fill value."""
        self._values[begin:end] = self._fill


class FunctionTable:
    """Table with one row (0 to n - 1, in no order) per recently called function. A function enters when it is called.
    It leaves when it has not been called for `idle_s` seconds. Beyond `limit` functions, the least recently called ones
    leave."""

    def __init__(self, limit: int, idle_s: float) -> None:
        self._limit, self._idle_s = limit, idle_s
        self._room = min(FIRST_ROOM, limit)
        self._columns: list[Column] = []
        self._rows: dict[str, int] = {}
        self.keys: list[str] = []
        """Keys of the functions, by row."""
        self.entered: list[Callable[[list[str], int], None]] = []
        """Callbacks run with the keys of entering functions and the first of their consecutive rows."""
        self.leaving: list[Callable[[list[str], Array], None]] = []
        """Callbacks run with the keys of leaving functions and their rows, before these are removed."""
        self.last_call = self.column(fill=-np.inf, dtype=np.float64)
        """Time (forecaster's clock, seconds) at the end of the second with each function's last call."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def bytes(self) -> int:
        """Memory of all columns in bytes, including unused rows."""
        return sum(column.bytes for column in self._columns)

    def column(self, shape: tuple[int, ...] = (), *, fill: float = 0.0, dtype: type = np.float32) -> Column:
        """Returns a new column; an entering function starts with the value `fill`."""
        column = Column(self, self._room, shape, fill, dtype)
        self._columns.append(column)
        return column

    def last_calls(self, keys: list[str]) -> Array:
        """Returns the times f64[keys] of these functions' last calls; minus infinity for functions not in the table."""
        present = [(number, row) for number, key in enumerate(keys) if (row := self._rows.get(key)) is not None]
        last = np.full(len(keys), -np.inf)
        last[[number for number, _ in present]] = self.last_call.live[[row for _, row in present]]
        return last

    def expire(self, now: float) -> None:
        """Removes the functions that have not been called for `idle_s` seconds."""
        self._remove(self.last_call.live < now - self._idle_s)

    def record(self, keys: list[str], now: float) -> tuple[Array, Array]:
        """Records calls of these distinct functions in the second that ends at `now`; new functions enter.

        Returns their rows, i64, and the seconds since their previous calls, f64, infinite for entering functions. Keys
        beyond the table's limit are left out.
        """
        keys = keys[: self._limit]
        present = [row for key in keys if (row := self._rows.get(key)) is not None]
        entering = [key for key in keys if key not in self._rows]
        self._evict(len(self) + len(entering) - self._limit, present)
        self._append(entering)
        rows = np.fromiter((self._rows[key] for key in keys), np.int64, len(keys))
        idle = now - self.last_call.live[rows]
        self.last_call.live[rows] = now
        return rows, idle

    def _evict(self, excess: int, spared: list[int]) -> None:
        if excess > 0:
            last = self.last_call.live.copy()
            last[spared] = np.inf
            leaving = np.zeros(len(self), bool)
            leaving[np.argpartition(last, excess - 1)[:excess]] = True
            self._remove(leaving)

    def _append(self, keys: list[str]) -> None:
        begin = len(self)
        self._rows.update(zip(keys, range(begin, begin + len(keys)), strict=True))
        self.keys += keys
        while self._room < len(self):
            self._room = min(2 * self._room, self._limit)
        for column in self._columns:
            column.grow(self._room)
            column.reset(begin, len(self))
        for notify in self.entered if keys else ():
            notify(keys, begin)

    def _remove(self, leaving: Array) -> None:
        """Removes the rows marked in `leaving`, bool[functions]. The last remaining rows move into the gaps."""
        removed = np.flatnonzero(leaving)
        if not len(removed):
            return
        keys = [self.keys[row] for row in removed.tolist()]
        for notify in self.leaving:
            notify(keys, removed)
        for key in keys:
            del self._rows[key]
        size = len(self) - len(removed)
        target = removed[removed < size]
        source = np.flatnonzero(~leaving[size:]) + size
        for column in self._columns:
            column.move(source, target)
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            key = self.keys[new] = self.keys[old]
            self._rows[key] = new
        del self.keys[size:]
