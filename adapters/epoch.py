"""The registry's epoch: the records that are about to change, in one small object that gateways read every second.

A writer marks a record before it commits a change of it. A gateway that has read the epoch and finds a record unmarked
knows that nothing was committed until then. That holds for every writer: one that was killed before it could notify
anybody, and one that shares no Redis with the reader. What is read of a marked record may be from before the commit, so
it is read again for DIRTY_SECONDS.

A gateway that reads the epoch for the first time, or has missed marks, learns from their times which of them still
count. `since` shows whether marks that are no longer named still count.
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
"""Newest marks that are kept, some 100 bytes each."""
MARK_SECONDS = 20.0
"""Seconds for which a mark covers attempts to commit; then the writer marks again."""
DIRTY_SECONDS = 120.0
"""MARK_SECONDS and the longest time that one write to the store may be under way, doubled."""

T = TypeVar("T")


class Mark(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Number of the mark: one more than that of the mark before."""
    key: str
    """Key of the record in the store."""
    ended: str = ""
    """Reason why the function's generations are to end now; empty: they may continue."""
    id: str = ""
    """Deduplication id of `ended`: the same message may also arrive through Redis."""
    at: float = 0.0
    """Time by the store's clock, some seconds before the mark at most; 0: made before `since`."""


class Epoch(msgspec.Struct, frozen=True):
    """The content of epoch.json: the newest marks."""

    id: str
    """Drawn when the object is made: the numbers of another one say nothing."""
    since: float
    """Time by the store's clock; all marks that were made later are here."""
    marks: tuple[Mark, ...] = ()

    @property
    def number(self) -> int:
        return self.marks[-1].number if self.marks else 0


def read_epoch(store: ObjectStore) -> Epoch:
    """Returns the epoch; makes it when there is none, or none that can be read. Raises StoreUnavailable."""
    try:
        epoch = find_record(store, EPOCH_KEY, Epoch)
    except CorruptRecord:
        store.delete(EPOCH_KEY)
        epoch = None
    return epoch or update_record(store, EPOCH_KEY, Epoch, lambda current: current or _new(store.now()))


def mark(store: ObjectStore, key: str, ended: str = "", number: str = "") -> None:
    """Adds a mark to the epoch: the record under `key` is about to change, or generations of its function end (`ended`
    says why, and `number` is the id by which those who hear of it twice know it). Raises StoreUnavailable."""

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
    """Does what `update_record` does for a record that gateways keep, which is marked whenever it is written. What a
    newer release has stored in it stays."""
    until = 0.0

    def marked() -> None:
        nonlocal until
        if time.monotonic() > until:
            until = time.monotonic() + MARK_SECONDS
            mark(store, key)

    return update_record(store, key, kind, change, marked, keeps_unknown=True)


def _new(now: float) -> Epoch:
    return Epoch(secrets.token_hex(8), now)
