"""Journal of usage on the local disk, so that a killed gateway loses nothing that the registry lacks.

Each running gateway process has a folder, protected by a file lock. It contains `id`, `lock`, and pairs of `snapshot-N`
(the sums at the start of segment N) and `log-N` (a line per call since then). After a crash, the sums are the newest
snapshot plus all logs from its number on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from adapters.full_disk import is_full
from gateway.usage.counts import Functions, UsageCounts, add_to

MAX_SLOTS = 64
"""Maximum processes that share a state directory. Several do so only while one replaces another."""

UNREADABLE_JOURNAL = "usage that another gateway process left can't be read"

log = logging.getLogger("gateway")


class JournalError(Exception):
    """The journal can't be used; the message says how to fix that."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """Line of a log, which records one call."""

    tenant: str
    hour: str
    part: int
    function: str
    version: str
    counts: UsageCounts


class Sums(msgspec.Struct):
    """Sums of a tenant's hour, stored as one object in the registry.

    The sums include `changes` calls, of which `flushed` were written to the registry.
    """

    tenant: str
    hour: str
    part: int
    """Number that distinguishes this gateway's objects of one hour. So new sums never overwrite sums that the gateway
    has written and forgotten."""
    functions: Functions
    changes: int = 0
    flushed: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        return self.tenant, self.hour, self.part

    def count(self, function: str, version: str, counts: UsageCounts) -> None:
        """Adds one call."""
        add_to(self.functions, function, version, counts)
        self.changes += 1


class Journal:
    """Usage journal of one gateway process: a numbered folder (slot) of the state directory, held with a file lock.

    `append` and `begin_segment` may run on the event loop; the other methods may block for long.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        """Opens the journal in `folder`. `lock`: descriptor of the folder's locked file. Raises OSError."""
        self._folder = folder
        self._lock = lock
        self._log: int | None = None
        self.size = 0
        """Size of the open log in bytes."""
        self.segment = 0
        self.gateway = _identity(folder)

    def read(self) -> Sequence[Sums]:
        """Returns the sums in the files of an earlier process, and sets `segment`. Raises JournalError, OSError."""
        snapshots, logs = _numbered(self._folder, "snapshot"), _numbered(self._folder, "log")
        first = max(snapshots, default=0)
        self.segment = max([*snapshots, *logs], default=0)
        sums: dict[tuple[str, str, int], Sums] = {}
        if snapshots:
            file = self._file("snapshot", first)
            try:
                summed = msgspec.json.decode(file.read_bytes(), type=list[Sums])
            except msgspec.DecodeError as error:
                raise _broken(file, str(error)) from None
            sums = {entry.key: entry for entry in summed}
        for number in sorted(number for number in logs if number >= first):
            for line in _lines(self._file("log", number)):
                key = line.tenant, line.hour, line.part
                sums.setdefault(key, Sums(*key, {})).count(line.function, line.version, line.counts)
        return list(sums.values())

    def begin_segment(self) -> None:
        """Opens the next log, to which lines are appended from now on. Raises OSError.

        The caller must then write a snapshot of the sums at this moment.
        """
        number = self.segment + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        opened = os.open(self._file("log", number), flags, 0o600)
        if self._log is not None:
            os.close(self._log)
        self._log, self.segment, self.size = opened, number, 0

    def append(self, line: Line) -> None:
        """Appends a line to the kernel's page cache, which outlives this process.

        That takes microseconds, so the event loop may do it. Raises OSError, for example if the disk is full; then
        nothing was appended.
        """
        if self._log is None:
            raise OSError("the log could not be opened")
        data = msgspec.json.encode(line) + b"\n"
        try:
            written = os.write(self._log, data)
            if written != len(data):
                raise OSError("only a part of the line was written to the disk")
        except OSError:
            os.ftruncate(self._log, self.size)  # an incomplete line would make later ones unreadable
            raise
        self.size += len(data)

    def write_snapshot(self, segment: int, data: bytes) -> None:
        """Writes the snapshot of a segment and removes older files. Raises OSError.

        `data`: JSON list of the Sums at the start of the segment.
        """
        temporary = self._file("new", segment)
        with temporary.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, self._file("snapshot", segment))
        for kind in ("snapshot", "log", "new"):
            for number in _numbered(self._folder, kind):
                if number < segment:
                    self._file(kind, number).unlink(missing_ok=True)

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None
        os.close(self._lock)

    def _file(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:08d}"


def claim_journal(folder: Path) -> Journal:
    """Returns the journal in the first slot that no running process has locked. Raises JournalError, OSError."""
    for slot in range(MAX_SLOTS):
        journal = _lock_journal(folder / str(slot))
        if journal is not None:
            return journal
    raise JournalError(f"{MAX_SLOTS} gateways use {folder} already; give each its own state directory")


def abandoned_journals(folder: Path) -> Iterator[Journal]:
    """Yields the journals of slots whose processes have exited. The caller must flush and close them.

    Journals that can't be read are logged and left in place.
    """
    for path in sorted(folder.iterdir()):
        try:
            journal = _lock_journal(path) if path.name.isdecimal() and path.is_dir() else None
        except (JournalError, OSError) as error:
            log.error(UNREADABLE_JOURNAL, exc_info=error)
        else:
            if journal is not None:
                yield journal


def _lock_journal(path: Path) -> Journal | None:
    """Returns the journal in the folder, which is created if it is missing; None if another process has its lock."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _open_lock(path / "lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Journal(path, lock)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise


def _open_lock(path: Path) -> int:
    """Opens the file, and creates it if it is missing. On a disk that takes no more writes, opens an existing file for
    reading, which is enough to lock it."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if not is_full(error):
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _identity(folder: Path) -> str:
    """Returns the id in the names of this journal's objects in the registry; creates it atomically if missing."""
    file = folder / "id"
    if not file.exists():
        temporary = folder / "id.new"
        temporary.write_text(secrets.token_hex(8))
        os.replace(temporary, file)
    identity = file.read_text()
    if len(identity) != 16 or not set(identity) <= set("0123456789abcdef"):
        raise _broken(file, "expected 16 hexadecimal digits")
    return identity


def _lines(file: Path) -> Iterator[Line]:
    """Yields the lines of a log. Raises JournalError if a line other than the last can't be read.

    The last line may be incomplete if the host stopped while writing it; it is dropped.
    """
    pieces = file.read_bytes().split(b"\n")
    for number, piece in enumerate(pieces):
        try:
            if piece:
                yield msgspec.json.decode(piece, type=Line)
        except msgspec.DecodeError as error:
            if any(_readable(later) for later in pieces[number + 1 :]):
                raise _broken(file, f"line {number + 1}: {error}") from None
            log.warning("the usage journal ends in an incomplete line, which is dropped", extra={"line": number + 1})
            return


def _readable(piece: bytes) -> bool:
    try:
        msgspec.json.decode(piece, type=Line)
    except msgspec.DecodeError:
        return False
    return True


def _numbered(folder: Path, kind: str) -> list[int]:
    suffixes = (path.name.removeprefix(f"{kind}-") for path in folder.glob(f"{kind}-*"))
    return sorted(int(number) for number in suffixes if number.isdecimal())


def _broken(file: Path, why: str) -> JournalError:
    return JournalError(f"{file} can't be read as usage journal ({why}): move it away to start without what it counted")
