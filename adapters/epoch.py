"""The registry's epoch: a list of records about to change, in one small object that gateways read every second.

A writer marks a record before it commits a change. A gateway that reads the epoch and finds a record unmarked knows
that no change was committed until then. That holds for every writer, even one that was killed before it could notify
others, or that shares no Redis with the reader. A read of a marked record may be older than the commit, so the record
is read again for DIRTY_SECONDS.

A gateway that reads the epoch for the first time, or has missed marks, decides by the marks' times which records it
must still read again. `since` shows whether that holds for records of dropped marks too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from adapters.errors import CorruptRecord
from adapters.records import find_record, update_record
from adapters.store import ObjectStore

EPOCH_KEY = "epoch.json"
MAX_MARKS = 200
"""Maximum number of stored marks, of some 100 bytes each; the newest are kept."""
MARK_SECONDS = 20.0
"""Seconds after a mark in which its writer may try to commit. A writer that needs longer marks the record again."""
DIRTY_SECONDS = 120.0
"""Time for which a marked record is read again. It covers MARK_SECONDS and the longest time of one write to the store,
with a safety factor of about two."""

T = TypeVar("T")


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Mark of a record that is about to change."""

    number: int
    """Number of the mark, one more than the previous mark's."""
    key: str
    """Object key of the marked record."""
    ended: str = ""
    """Reason why the function's running generations must end now; empty: they may continue."""
    id: str = ""
    """Deduplication id of `ended`, since the same message may also arrive through Redis."""
    at: float = 0.0
    """Unix time by the store's clock, at most a few seconds before the mark was written; 0: written before `since`."""


class Epoch(msgspec.Struct, frozen=True):
    """Content of epoch.json: the newest marks."""

    id: str
    """Random id drawn when the object is created. Mark numbers of objects with different ids can't be compared."""
    since: float
    """Unix time by the store's clock; all marks made after it are in `marks`."""
    marks: tuple[Mark, ...] = ()

    @property
    def number(self) -> int:
        """Number of the newest mark; 0 without marks."""
        return self.marks[-1].number if self.marks else 0


def read_epoch(store: ObjectStore) -> Epoch:
    """Returns the epoch, after creating it if it does not exist or is unreadable. Raises StoreUnavailable."""
    try:
        epoch = find_record(store, EPOCH_KEY, Epoch)
    except CorruptRecord:
        store.delete(EPOCH_KEY)
        epoch = None
    return epoch or update_record(store, EPOCH_KEY, Epoch, lambda current: current or _new(store.now()))


def mark(store: ObjectStore, key: str, ended: str = "", number: str = "") -> None:
    """Adds a mark to the epoch: the record under `key` is about to change. If `ended` is not empty, the function's
    running generations end for this reason, and `number` is the deduplication id of the message. Raises
    StoreUnavailable."""

    def marked(current: Epoch | None) -> Epoch:
        now = store.now()
        epoch = current or _new(now)
        marks = (*epoch.marks, Mark(epoch.number + 1, key, ended, number, now))
        dropped, newest = marks[:-MAX_MARKS], marks[-MAX_MARKS:]
        return Epoch(epoch.id, max([epoch.since, *(each.at for each in dropped)]), newest)

    try:
        update_record(store, EPOCH_KEY, Epoch, marked)
    except CorruptRecord:
        read_epoch(store)
        update_record(store, EPOCH_KEY, Epoch, marked)


def update_marked(store: ObjectStore, key: str, kind: type[T], change: Callable[[T | None], T]) -> T:
    """Changes a record that gateways cache, like `update_record`, and marks it before each write. Keeps fields that a
    newer release has stored."""
    until = 0.0

    def marked() -> None:
        nonlocal until
        if time.monotonic() > until:
            until = time.monotonic() + MARK_SECONDS
            mark(store, key)

    return update_record(store, key, kind, change, marked, keeps_unknown=True)


def _new(now: float) -> Epoch:
    return Epoch(secrets.token_hex(8), now)
