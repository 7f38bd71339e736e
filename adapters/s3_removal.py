"""Removal of an old object from S3 while deploys may rewrite it.

S3 has no condition on the time of a write, and rewritten content keeps its ETag. A removal therefore writes a mark for
the object, checks its age again, removes the object and deletes the mark. A writer waits until none of its objects is
marked, and then checks that they exist.

Either the write or the second age check comes first. If the write is first, the check finds the object young, and it
stays. If the check is first, the mark existed before the write. The writer then either finds the mark and waits, or
finds the removal finished and sees which objects are missing.

A mark whose removal may still take effect, because its reply was lost or its process died, stays until it expires.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection

from adapters.errors import StoreUnavailable
from adapters.store import ObjectStore, all_objects

FOLDER = "removals/"
BEGIN_SECONDS = 30.0
"""Maximum seconds from the mark to the removal; a later removal is abandoned."""
MARK_SECONDS = 120.0
"""Seconds after a mark by which its removal has taken effect, since a call ends within about half a minute
(S3Limits)."""
POLL_SECONDS = 0.2


def remove_older(store: ObjectStore, key: str, before: float) -> bool:
    """Implements `ObjectStore.delete_older` for S3. Also returns False when the removal could not start within
    BEGIN_SECONDS."""
    if not _is_older(store, key, before):
        return False
    began, mark = time.monotonic(), f"{FOLDER}{_mark_prefix(key)}-{secrets.token_hex(8)}"
    store.put(mark, key.encode())
    if not _is_older(store, key, before) or time.monotonic() - began > BEGIN_SECONDS:
        store.delete(mark)
        return False
    store.delete(key)
    store.delete(mark)
    return True


def await_removals(store: ObjectStore, keys: Collection[str]) -> None:
    """Blocks until no `remove_older` of any of these objects is in progress. Raises StoreUnavailable if one still is
    after 2 * MARK_SECONDS."""
    names, until = {_mark_prefix(key) for key in keys}, time.monotonic() + 2 * MARK_SECONDS
    while True:
        live = False
        for mark in all_objects(store, FOLDER):
            if store.now() - mark.modified > MARK_SECONDS:
                store.delete(mark.key)
            else:
                live = live or mark.key.removeprefix(FOLDER).partition("-")[0] in names
        if not live:
            return
        if time.monotonic() > until:
            raise StoreUnavailable("the written objects are removed again and again")
        time.sleep(POLL_SECONDS)


def _is_older(store: ObjectStore, key: str, before: float) -> bool:
    info = store.head(key)
    return info is not None and info.modified < before


def _mark_prefix(key: str) -> str:
    """Returns the beginning of the names of all marks that a removal of the object leaves."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]
