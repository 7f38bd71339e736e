"""ObjectStore in a directory of one host: atomic by rename and link, durable by fsync, exclusive by file locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from adapters.errors import Conflict, NotFound, PreconditionFailed, StoreUnavailable
from adapters.full_disk import is_full, store_error
from adapters.store import MAX_LIST, Arrived, Object, ObjectInfo, check_key

LOCK_SECONDS = 10.0
"""Maximum time to wait for a lock; its holders only compare, rename and fsync."""
SHARDS = 256
STALE_SECONDS = 60.0
"""Minimum age of a temporary file without a living writer before it is removed."""
PLACE_ATTEMPTS = 100
"""Maximum number of attempts to place a file in a folder that other processes keep removing."""
CHUNK = 1 << 20


class LocalStore:
    """ObjectStore whose objects are files under `root` (modes 0700 and 0600). The folders `.tmp` and `.locks` in it are
    internal.

    An etag is the SHA-256 of the content, so no separate record can disagree with it. Only small records are ever read
    completely. Large immutable objects are hashed once, while they are written.
    """

    readers = 1

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._tmp = self.root / ".tmp"
        self._locks = self.root / ".locks"
        with _translated():
            for directory in (self.root, self._tmp, self._locks):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()

    def now(self) -> float:
        with _translated():
            try:
                fd = os.open(self._locks / "clock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if is_full(error):
                    return time.time()  # nothing can be stored with this time, but gateways start and serve
                raise
            try:
                os.utime(fd)  # the file system's host sets the time
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)

    def get(self, key: str) -> Object:
        with _translated():
            data = self._read(key)
        return Object(data=data, etag=hashlib.sha256(data).hexdigest())

    def head(self, key: str) -> ObjectInfo | None:
        with _translated():
            try:
                stat = self._path(key).stat()
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return None
        if not S_ISREG(stat.st_mode):
            return None
        return ObjectInfo(key=key, size=stat.st_size, modified=stat.st_mtime)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with _translated(), self._open(key) as stream:
            stream.seek(start)
            return stream.read(length)

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        with _translated(), self._open(key) as stream:
            stream.seek(start)
            count = stream.readinto(buffer)
        if arrived is not None:
            arrived(count)
        return count

    def put(self, key: str, data: bytes | Path) -> str:
        path = self._path(key)
        with _translated(), self._written(data) as (temporary, etag), self._locked(key):
            self._place(path, lambda: os.replace(temporary, path))
        return etag

    def put_if_absent(self, key: str, data: bytes | Path) -> str:
        path = self._path(key)
        if self.head(key) is not None:  # spares the copy of a large blob; the link below decides
            raise Conflict(f"{key} exists already")
        with _translated(), self._written(data) as (temporary, etag):
            try:
                # Fails if the name is taken: the check and the write are one step.
                self._place(path, lambda: os.link(temporary, path))
            except FileExistsError:
                raise Conflict(f"{key} exists already") from None
        return etag

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        path = self._path(key)
        with _translated(), self._written(data) as (temporary, new_etag), self._locked(key):
            try:
                current = self._read(key)
            except NotFound:
                raise PreconditionFailed(f"{key} does not exist any more") from None
            if hashlib.sha256(current).hexdigest() != etag:
                raise PreconditionFailed(f"{key} was changed by someone else")
            os.replace(temporary, path)
            _sync_directory(path.parent)
        return new_etag

    def list(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[ObjectInfo]:
        infos = (self.head(key) for key in self._walk("", prefix, after))
        with _translated():
            return tuple(islice((info for info in infos if info is not None), min(limit, MAX_LIST)))

    def folders(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[str]:
        with _translated():
            marked = [name for name in self._entries(prefix) if name.endswith("/") and name > (after and after + "/")]
            nonempty = (name[:-1] for name in marked if next(self._walk(prefix + name, prefix + name, ""), None))
            return tuple(islice(nonempty, min(limit, MAX_LIST)))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(), self._locked(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._remove(path)

    def delete_older(self, key: str, before: float) -> bool:
        path = self._path(key)
        with _translated(), self._locked(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.stat().st_mtime < before:
                self._remove(path)
                return True
        return False

    def missing(self, keys: Sequence[str]) -> Sequence[str]:
        return [key for key in keys if self.head(key) is None]  # `delete_older` checks and removes under the lock

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[BufferedReader]:
        try:
            stream = self._path(key).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._check_root()
            raise NotFound(f"there is no object {key}") from None
        with stream:
            yield stream

    def _read(self, key: str) -> bytes:
        with self._open(key) as stream:
            return stream.read()

    @contextlib.contextmanager
    def _written(self, data: bytes | Path) -> Iterator[tuple[Path, str]]:
        """Yields a synced temporary file with the content, and its etag. Removes the file afterwards if it still
        exists."""
        path = self._tmp / f"{os.getpid()}-{threading.get_ident()}-{uuid.uuid4().hex}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as out:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shows `_sweep` that the writer is alive
                etag = _copy(data, out)
                out.flush()
                os.fsync(out.fileno())
                yield path, etag
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the key's lock, which excludes other compare-and-write steps in this and other processes. Raises
        StoreUnavailable when the lock is not free within LOCK_SECONDS."""
        shard = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % SHARDS
        deadline = time.monotonic() + LOCK_SECONDS
        fd = os.open(self._locks / f"{shard:02x}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            pause = 0.0005
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreUnavailable("the registry is busy: a lock was not free in time") from None
                    time.sleep(pause)
                    pause = min(pause * 2, 0.02)
            yield
        finally:
            os.close(fd)

    def _place(self, path: Path, name_it: Callable[[], None]) -> None:
        """Places a new file at `path` by calling `name_it`, after creating missing folders."""
        for attempt in range(PLACE_ATTEMPTS):
            try:
                _make_parents(path.parent, self.root)
                name_it()
                break
            except FileNotFoundError:  # another process removed a folder that had become empty
                if attempt == PLACE_ATTEMPTS - 1 or not self._tmp.is_dir():
                    raise
        with contextlib.suppress(FileNotFoundError):  # the file was removed again, together with its folder
            _sync_directory(path.parent)

    def _remove(self, path: Path) -> None:
        """Removes the file and the folders that become empty, so that listings do not get slower over time."""
        path.unlink()
        _sync_directory(path.parent)
        with contextlib.suppress(OSError):  # not empty, or another process removed it first
            for folder in path.relative_to(self.root).parents[:-1]:
                (self.root / folder).rmdir()

    def _sweep(self) -> None:
        """Removes temporary files whose writers have died."""
        for path in self._tmp.iterdir():
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                if time.time() - path.stat().st_mtime < STALE_SECONDS:
                    continue
                with path.open("rb") as stream:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()

    def _entries(self, folder: str) -> Sequence[str]:
        """Returns the names in a folder (a key prefix that ends with "/") in key order. Names of folders end with
        "/"."""
        try:
            with os.scandir(self.root / folder) as entries:
                names = [entry.name + ("/" if entry.is_dir() else "") for entry in entries if entry.name[0] != "."]
        except (FileNotFoundError, NotADirectoryError):
            names = []
        if not names:
            self._check_root()
        return sorted(names)

    def _check_root(self) -> None:
        """Raises StoreUnavailable when the root of the store is missing, for instance unmounted. It must not look like
        a missing object."""
        if not self._tmp.is_dir():
            raise StoreUnavailable(f"the registry's directory is gone or is no registry: {self._tmp.name} is missing")

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[str]:
        """Yields the keys in `folder` that start with `prefix` and are greater than `after`. Skips folders that can't
        contain such keys."""
        for name in self._entries(folder):
            key = folder + name
            if not (key.startswith(prefix) or (name.endswith("/") and prefix.startswith(key))):
                continue
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    yield from self._walk(key, prefix, after)
            elif key > after:
                yield key


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Converts OSError to StoreFull or StoreUnavailable. The error's text may contain paths, so it stays in the
    cause."""
    try:
        yield
    except OSError as error:
        raise store_error(error, "the registry's directory can't be used") from error


def _copy(data: bytes | Path, out: BinaryIO) -> str:
    """Writes the content to `out`, and returns its SHA-256 (hex)."""
    sha256 = hashlib.sha256()
    with BytesIO(data) if isinstance(data, bytes) else data.open("rb") as source:
        while chunk := source.read(CHUNK):
            sha256.update(chunk)
            out.write(chunk)
    return sha256.hexdigest()


def _make_parents(directory: Path, root: Path) -> None:
    """Creates missing folders below `root`, and makes each durable in its parent folder."""
    for folder in (*reversed(directory.relative_to(root).parents[:-1]), directory.relative_to(root)):
        # Existing folders are synced too: whoever made one may have died before its own sync.
        with contextlib.suppress(FileExistsError):
            (root / folder).mkdir(mode=0o700)
        _sync_directory((root / folder).parent)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
