"""Folders of the gateway's host from which adapters may be deployed: `file:///folder`."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from threading import Event
from typing import BinaryIO

import msgspec

from adapters.errors import InvalidRequest, StoreUnavailable, TooLarge

SCHEME = "file://"
PIECE_BYTES = 4 << 20


class LocalPlace(msgspec.Struct, frozen=True):
    """A folder, and the folder that the operator allows, which holds it."""

    folder: Path
    allowed: Path


def parse_folder(url: str) -> Path:
    """Returns the folder of `file:///folder` or `/folder`. Raises InvalidRequest, which says what is wrong with it."""
    text = url.removeprefix(SCHEME)
    if not text.startswith("/") or "\0" in text or len(text) > 4096:
        raise InvalidRequest("source", f"{url[:200]!r} is not of the form file:///folder")
    folder = Path(text)
    if ".." in folder.parts or folder == Path("/"):
        raise InvalidRequest("source", f"{url[:200]!r} is the root folder, or has '..' in it")
    return folder


def is_within(folder: Path, allowed: Path) -> bool:
    """Returns whether the folder is the allowed one, or below it, by their names alone."""
    return folder == allowed or allowed in folder.parents


class LocalCopy:
    """A place that is being copied. `remaining_bytes` is the number of bytes that may still be copied."""

    def __init__(self, place: LocalPlace, limit: int, deadline: float, stop: Event) -> None:
        self._place, self._deadline, self._stop = place, deadline, stop
        self.remaining_bytes = limit

    def file(self, target: Path, limit: int) -> None:
        """Copies the place's file that has the name of `target` to `target`. Raises as `copy_file`."""
        limit = min(limit, self.remaining_bytes)
        with target.open("wb") as out:
            size = copy_file(self._place, target.name, out, limit=limit, deadline=self._deadline, stop=self._stop)
        self.remaining_bytes -= size


def copy_file(place: LocalPlace, name: str, out: BinaryIO, *, limit: int, deadline: float, stop: Event) -> int:
    """Copies a file of the place, and returns its size. Links are followed inside of the allowed folder only.

    Stops with StoreUnavailable at `deadline` (monotonic seconds) or when `stop` is set. Raises InvalidRequest if the
    file is missing, unreadable or was rewritten meanwhile, TooLarge and OSError of `out`.
    """
    with _opened(place, name) as file:
        before, copied = os.fstat(file.fileno()), 0
        if before.st_size > limit:
            raise TooLarge(f"{name} in the source has {before.st_size} bytes, {limit} are allowed", limit)
        while copied <= limit and (piece := file.read(PIECE_BYTES)):
            if stop.is_set() or time.monotonic() > deadline:
                raise StoreUnavailable("the source was not copied in time")
            copied += len(piece)
            out.write(piece)
        after = os.fstat(file.fileno())
    if (copied, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise InvalidRequest("source", f"{name} was rewritten while it was copied")
    if not copied:
        raise InvalidRequest("source", f"{name} in the source is empty")
    return copied


def _opened(place: LocalPlace, name: str) -> BinaryIO:
    try:
        real, allowed = (Path(os.path.realpath(path)) for path in (place.folder / name, place.allowed))
        if not is_within(real, allowed):
            raise InvalidRequest("source", f"{name} in the source is a link that leads out of the allowed folder")
        # Not blocking, since it may be a pipe; no link, since it may have been replaced by one just now.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        problem = f"there is no {name} in the source, or it is not shown to this service"
    except OSError:
        problem = f"this service may not read {name} in the source"
    else:
        # Looked at again: a folder above it may have been replaced by a link just now.
        opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and is_within(opened, allowed):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
        problem = f"{name} in the source is no file"
    raise InvalidRequest("source", problem) from None
