"""Ranged reads from S3 into the caller's memory; large ones in parallel pieces."""

from __future__ import annotations

import re
from collections.abc import Collection
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

from adapters.errors import StoreUnavailable
from adapters.s3_calls import ANSWERS, Interrupted, Refused, S3Calls, read_body
from adapters.s3_upload import gather
from adapters.store import Arrived

REREADS = 4
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)", re.ASCII)


class Piece(NamedTuple):
    """Result of one ranged read."""

    length: int
    """Number of bytes read."""
    total: int
    """Size of the complete object in bytes."""
    etag: str


def read_range(
    calls: S3Calls,
    pool: Executor,
    target: dict[str, str],
    start: int,
    buffer: memoryview,
    arrived: Arrived | None = None,
) -> int:
    """Fills `buffer` from offset `start`, and returns the number of bytes read, fewer if the object ends before.

    `arrived` is called as bytes of the first piece arrive, and once more when all pieces are complete. Raises Refused
    (404) or StoreUnavailable. After an exception nothing writes to `buffer` any more.
    """
    size = calls.limits.part
    for _ in range(REREADS):
        try:
            first = read_piece(calls, target, start, buffer[:size], arrived=arrived)
        except Refused as refused:
            if refused.status == 416:  # the object ends before `start`
                return 0
            raise
        needed = min(len(buffer), first.total - start)
        rest = [
            partial(read_piece, calls, target, start + at, buffer[at : min(at + size, needed)], first.etag)
            for at in range(size, needed, size)
        ]
        try:
            gather(pool, rest)
        except Refused:
            continue  # rewritten or deleted between the first piece and another one
        if rest and arrived is not None:
            arrived(needed)
        return needed
    raise StoreUnavailable("an object is rewritten too often to be read")


def read_piece(
    calls: S3Calls,
    target: dict[str, str],
    start: int,
    buffer: memoryview,
    etag: str = "",
    answers: Collection[int] = ANSWERS,
    arrived: Arrived | None = None,
) -> Piece:
    """Fills `buffer` by one ranged get from offset `start`. With `etag`, only content with that ETag is read. Returns
    the number of bytes read, and size and ETag of the object. Raises Refused for a status in `answers`."""
    deadline = calls.deadline(len(buffer))
    condition = {"IfMatch": etag} if etag else {}

    def read(client: Any) -> Piece:
        reply = client.get_object(**target, **condition, Range=f"bytes={start}-{start + len(buffer) - 1}")
        with reply["Body"]:
            piece = _checked(reply, start, len(buffer))
            read_body(reply, buffer[: piece.length], deadline, arrived)
        return piece

    return calls.run(read, deadline, answers)


def _checked(reply: Any, start: int, length: int) -> Piece:
    """Returns the piece described by the reply's Content-Range header. Raises Interrupted when that is not the
    requested range."""
    match = _CONTENT_RANGE.fullmatch(reply.get("ContentRange", ""))
    if match is None:
        raise Interrupted("the answer to a ranged read has no range")
    first, last, total = map(int, match.groups())
    if first != start or last + 1 != min(start + length, total):
        raise Interrupted(f"bytes {first} to {last} of {total} arrived instead of {length} from {start}")
    return Piece(last + 1 - first, total, reply["ETag"])
