"""Removal of an old object from S3 while deploys may write it again.

S3 has no condition on the time of a write, and content that is written again keeps its ETag. So a removal marks the
object, checks it once more, removes it and takes the mark away. A writer waits until none of its objects is marked, and
then checks that they are there. Either the write or the second check comes first: if it is the write, the object is
seen to be young and stays. If it is the check, the mark was there before the write, so the writer meets it and waits,
or it is gone again, and the removal is done: the writer sees what is left.

A mark whose removal may still take effect, because its answer was lost or its process died, stays until it expires.
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
"""Longest time from the mark to the removal; a removal that is later is given up."""
MARK_SECONDS = 120.0
"""Seconds after its mark by which a removal has taken effect: a call ends within about half a minute (see S3Limits)."""
POLL_SECONDS = 0.2


def remove_older(store: ObjectStore, key: str, before: float) -> bool:
    """Does the work of `ObjectStore.delete_older` for S3; returns False, too, when the removal could not begin within
    BEGIN_SECONDS."""
    if not _is_older(store, key, before):
        return False
    began, mark = time.monotonic(), f"{FOLDER}{_name(key)}-{secrets.token_hex(8)}"
    store.put(mark, key.encode())
    if not _is_older(store, key, before) or time.monotonic() - began > BEGIN_SECONDS:
        store.delete(mark)
        return False
    store.delete(key)
    store.delete(mark)
    return True


def await_removals(store: ObjectStore, keys: Collection[str]) -> None:
    """Blocks until no removal of any of these objects is under way (`remove_older`). Raises StoreUnavailable when some
    still are after 2 * MARK_SECONDS."""
    names, until = {_name(key) for key in keys}, time.monotonic() + 2 * MARK_SECONDS
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
            raise StoreUnavailable("what was written is being removed again and again")
        time.sleep(POLL_SECONDS)


def _is_older(store: ObjectStore, key: str, before: float) -> bool:
    info = store.head(key)
    return info is not None and info.modified < before


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]
