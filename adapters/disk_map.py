"""A string-to-string map on disk, for as many entries as a registry has objects."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

CACHE_KIB = 16_384
BATCH = 1000


class DiskMap:
    """A string-to-string map in a temporary file, which is deleted when the context ends. Use it as a context manager
    in one thread. SQLite's cache bounds its memory."""

    def __enter__(self) -> DiskMap:
        self._folder = tempfile.TemporaryDirectory(prefix="garnish-")
        self._base = sqlite3.connect(Path(self._folder.name) / "map", isolation_level=None)
        for setting in ("journal_mode = off", "synchronous = off", f"cache_size = -{CACHE_KIB}"):
            self._base.execute(f"pragma {setting}")
        self._base.execute("create table map (name text primary key, value text) without rowid")
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()
        self._folder.cleanup()

    def put(self, name: str, value: str = "") -> None:
        """Sets the value of `name`."""
        self._base.execute("insert or replace into map values (?, ?)", (name, value))

    def get(self, name: str) -> str | None:
        """Returns the value of `name`; None if it is not in the map."""
        row = self._base.execute("select value from map where name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def names(self) -> Iterator[str]:
        """Yields the names in ascending order. Entries may be added meanwhile."""
        after = ""
        while True:
            page = self._base.execute("select name from map where name > ? order by name limit ?", (after, BATCH))
            names = [str(row[0]) for row in page]
            yield from names
            if len(names) < BATCH:
                return
            after = names[-1]
