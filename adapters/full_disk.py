"""Distinguishes a disk without room, or a read-only one, from other failures of files."""

from __future__ import annotations

import errno

from adapters.errors import StoreFull, StoreUnavailable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READ_ONLY = (errno.EROFS,)


def is_full(error: OSError) -> bool:
    """Returns whether the disk takes no more: it is full, a quota or a file's largest size is reached, or it is
    read-only."""
    return error.errno in (*FULL, *READ_ONLY)


def store_error(error: OSError, what: str) -> StoreUnavailable:
    """Returns StoreFull if the disk takes no more, else StoreUnavailable.

    `what` says what can't be used. The error's own text may contain paths, so only its reason is taken over.
    """
    kind = StoreFull if is_full(error) else StoreUnavailable
    return kind(f"{what} ({error.strerror or 'I/O error'})")
