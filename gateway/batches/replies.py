"""Answers of a batch's calls, as lines of its output and error files, written part by part."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import msgspec

from gateway.batches.files import FileStore, Part

PART_BYTES = 1 << 20
"""Size, in bytes, from which a part is complete. A smaller part is written again as it grows."""
AGAIN = frozenset({"rate_limited", "overloaded", "unavailable"})
"""Errors of calls that have not run, after which the call is queued again."""
FLEETING = frozenset({"node_failed", "timeout", "internal"})
"""Errors after which a call is retried a few times."""


class LineReply(msgspec.Struct, frozen=True):
    """Reply to a call: the status and body that its route returned."""

    status: int
    body: bytes
    request_id: str


class Answer(NamedTuple):
    """Answer to a call. `error` is the type of the error in the reply; None without an error."""

    reply: LineReply
    error: str | None = None
    retry_after: float | None = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class ReplyLine(msgspec.Struct, frozen=True):
    """Line of an output or error file. `error` is set if the call was never answered."""

    id: str
    custom_id: str
    response: _Response | None = None
    error: dict[str, Any] | None = None


def reply_line(custom_id: str, reply: LineReply) -> bytes:
    response = _Response(reply.status, reply.request_id, msgspec.Raw(reply.body))
    return _encoded(ReplyLine(_new_id(), custom_id, response))


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    return _encoded(ReplyLine(_new_id(), custom_id, error={"code": code, "message": message}))


class PartWriter:
    """Writer of a file's parts, which appends lines.

    Only the parts and bytes that the batch's record lists are valid. A writer that lost the batch can't disturb the
    next one, whose parts have another `claim` in their names.
    """

    def __init__(self, files: FileStore, tenant: str, file_id: str, claim: int, parts: tuple[Part, ...]) -> None:
        self._files, self._tenant, self._file_id, self._claim = files, tenant, file_id, claim
        self._written = list(parts)
        self._current = bytearray()
        self._number = 0
        self._changed = False

    def add(self, line: bytes) -> None:
        self._current += line
        self._changed = True

    def take(self) -> tuple[str, bytes] | None:
        """Returns the next part to write as (name, content), and adds it to `parts`. Returns None if there are no new
        lines."""
        if not self._changed:
            return None
        self._changed = False
        name, data = f"{self._claim:06d}-{self._number:06d}", bytes(self._current)
        if self._written and self._written[-1].name == name:
            self._written.pop()
        self._written.append(Part(name, len(data)))
        if len(data) >= PART_BYTES:
            self._current.clear()
            self._number += 1
        return name, data

    def write(self, name: str, data: bytes) -> None:
        """Writes a part, which may be written again. Blocks. Raises StoreUnavailable."""
        self._files.put_part(self._tenant, self._file_id, name, data)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._written)


def _encoded(line: ReplyLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
