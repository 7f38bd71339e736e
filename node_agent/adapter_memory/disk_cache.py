"""Disk cache of adapters: written while they stream in from the store, and reused after a restart.

A file has what an engine reads of one adapter, and is named by its digest and base. What is in a file is the engine's
choice: a head, and pieces after it (`cached_artifact` for our own engine, node_agent.vllm.cached_files for vLLM). It is
written under a temporary name and renamed once all pieces are verified. It is not synced: a file damaged by a crash
fails its hashes when it is read, and the adapter is then read from the store. At start each file's head is checked;
pieces are checked whenever they are read. Failures of the cache are counted, and loads continue without it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import AdapterError
from cluster.residency import HeldTier
from node_agent.config import DiskCacheConfig

NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}", re.ASCII)
"""Pattern of a cached file's name: the adapter's digest and the base model's fingerprint."""
TEMPORARY = ".part"
MAX_LISTED = 1024
"""Maximum number of adapters that are listed for operators although they are on disk alone. The memory tiers are small
enough to list all."""
MAX_REPORTED = 256
"""Maximum number of adapters in a node's report that are on disk alone."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedFile:
    """Adapter on the disk, read like an ObjectStore. The file may vanish at any time."""

    cache: DiskCache
    digest: str
    path: Path

    def get_range(self, key: str, start: int, length: int) -> bytes:  # noqa: ARG002 - as ObjectStore.get_range
        buffer = bytearray(length)
        return bytes(buffer[: self.read_into(start, memoryview(buffer))])

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Reads into the buffer from offset `start`. Returns the bytes read, which are fewer at the end of the file.
        Raises OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.preadv(fd, [buffer], start)
        finally:
            os.close(fd)

    def drop(self, reason: str) -> None:
        self.cache.drop(self.digest, reason)


Check = Callable[[CachedFile, int], bool]
"""Function of a file and its size that returns whether its head is intact and says the file's name and size. May raise
AdapterError and OSError."""


class CacheWriter:
    """Writes one adapter to the disk. Threads write its pieces in any order; the last one renames the file into
    place."""

    def __init__(self, cache: DiskCache, digest: str, head: bytes, size: int, pieces: int) -> None:
        """`size`: bytes of the file, the head included."""
        self.cache, self.digest, self.size = cache, digest, size
        self.path = cache.path_of(digest)
        self.temporary = self.path.with_suffix(f".{os.getpid()}-{id(self):x}{TEMPORARY}")
        self._missing = pieces
        self._lock = threading.Lock()
        self._fd = -1
        self._open(head)

    def write(self, offset: int, piece: bytes | memoryview) -> None:
        """Writes a piece. The last one may be written only once all are verified. Never raises: if the disk is full,
        the adapter is not cached."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                _write_all(self._fd, memoryview(piece), offset)
                self._missing -= 1
                if not self._missing:
                    os.close(self._fd)
                    self._fd = -1
                    os.replace(self.temporary, self.path)
                    self.cache.keep(self.digest, self.size)
            except OSError as error:
                self._give_up(error)

    def end(self) -> None:
        """Ends the writer when its load has ended. An incomplete file is removed."""
        with self._lock:
            if self._fd >= 0:
                self._give_up(None)

    def _open(self, head: bytes) -> None:
        try:
            self._fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(
                self._fd, 0, self.size
            )  # reserve the space first, so that a full disk is noticed at once
            _write_all(self._fd, memoryview(head), 0)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError | None) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with suppress(OSError):
            self.temporary.unlink(missing_ok=True)
        self.cache.give_back(self.size, error)


class DiskCache:
    """Adapters on the disk, at most `bytes` including files being written. Evicts the least recently used first."""

    def __init__(self, config: DiskCacheConfig, base: str, check: Check) -> None:
        """Indexes the files of earlier runs that `check` finds intact. `base`: fingerprint of the node's base model.
        Raises OSError when the directory is unusable or another node uses it."""
        self.directory, self.limit, self.base, self._check = Path(config.path), config.bytes, base, check
        self.failures = 0
        """Number of failed writes, most likely because of a full disk."""
        self.damaged = 0
        """Number of files with unexpected content."""
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Sizes in bytes by file name, least recently used first."""
        self._writing = 0
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._find()
        except BaseException:
            os.close(self._owner)
            raise

    def path_of(self, digest: str) -> Path:
        return self.directory / self._name(digest)

    def open(self, digest: str) -> CachedFile | None:
        """Returns the adapter's file and marks it as used; None when there is none."""
        with self._lock:
            if self._name(digest) not in self._sizes:
                return None
            self._sizes.move_to_end(self._name(digest))
        path = self.path_of(digest)
        with suppress(OSError):
            os.utime(path)  # keeps the order of use across restarts
        return CachedFile(self, digest, path)

    def has(self, digest: str) -> bool:
        with self._lock:
            return self._name(digest) in self._sizes

    def contents(self) -> Sequence[tuple[str, int]]:
        """Returns (digest, bytes) of the cached adapters of this node's base model, most recently used first."""
        with self._lock:
            here = [(name[:64], size) for name, size in self._sizes.items() if name.endswith(self.base)]
        return here[::-1]

    def writer(self, digest: str, head: bytes, size: int, pieces: int) -> CacheWriter | None:
        """Returns a writer for an adapter that is being fetched, and evicts files to make room. Returns None if the
        adapter is already cached, larger than the cache or without pieces, or if other writers use the room."""
        name = self._name(digest)
        if not NAME.fullmatch(name) or size > self.limit or not pieces:
            return None
        with self._lock:
            victims = None if name in self._sizes else self._make_room(size)
            if victims is None:
                return None
            self._writing += size
        self._remove(victims)
        return CacheWriter(self, digest, head, size, pieces)

    def drop(self, digest: str, reason: str) -> None:
        """Removes a file that is damaged or unreadable, and counts it as damaged."""
        if self.remove(digest):
            with self._lock:
                self.damaged += 1
            log.warning(
                "an adapter in the disk cache is damaged and was removed", extra={"digest": digest, "reason": reason}
            )

    def remove(self, digest: str) -> bool:
        """Removes the adapter's file. Returns False when there is none."""
        with self._lock:
            if self._sizes.pop(self._name(digest), None) is None:
                return False
        self._remove([self._name(digest)])
        return True

    def keep(self, digest: str, size: int) -> None:
        """Adds the finished file of a writer to the index."""
        with self._lock:
            self._writing -= size
            self._sizes[self._name(digest)] = size

    def give_back(self, size: int, error: OSError | None) -> None:
        """Frees the room of a writer that has ended without a file. `error`: why it failed; None if its load ended
        first."""
        with self._lock:
            self._writing -= size
            self.failures += error is not None
        if error is not None:
            log.warning("an adapter can't be written to the disk cache", extra={"reason": error.strerror or str(error)})

    def close(self) -> None:
        os.close(self._owner)

    # --- inside

    def _name(self, digest: str) -> str:
        return f"{digest}-{self.base}"

    def _make_room(self, size: int) -> list[str] | None:
        """Returns the names of files to delete for `size` more bytes, already removed from the index. Returns None when
        writers use the room. The caller must hold the lock."""
        if self._writing + size > self.limit:
            return None
        victims = []
        while self._writing + size + sum(self._sizes.values()) > self.limit:
            victims.append(self._sizes.popitem(last=False)[0])
        return victims

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(OSError):
                (self.directory / name).unlink(missing_ok=True)

    def _find(self) -> None:
        """Indexes the complete files of earlier runs whose heads are intact, and deletes all others."""
        files: list[tuple[float, str, int]] = []
        for path in self.directory.iterdir():
            if path.name.endswith(TEMPORARY):
                path.unlink(missing_ok=True)
            elif NAME.fullmatch(path.name):
                stat = path.stat()
                files.append((stat.st_mtime, path.name, stat.st_size))
        for _, name, size in sorted(files):
            if self._is_sound(name, size):
                self._sizes[name] = size
            else:
                self.damaged += 1
                self._remove([name])
        victims = self._make_room(0)
        assert victims is not None  # no writer is open at the start
        self._remove(victims)

    def _is_sound(self, name: str, size: int) -> bool:
        try:
            return self._check(CachedFile(self, name[:64], self.directory / name), size)
        except (AdapterError, OSError):
            return False


def tier_below(cache: DiskCache | None, digest: str) -> HeldTier:
    """Returns the tier from which an adapter comes that is not in host memory."""
    return "disk" if cache is not None and cache.has(digest) else "absent"


def on_disk_alone(cache: DiskCache | None, above: Container[str]) -> list[tuple[str, int]]:
    """Returns (digest, bytes) of the cached adapters that are not in `above`, most recently used first."""
    return [] if cache is None else [(digest, size) for digest, size in cache.contents() if digest not in above]


def open_cache(config: DiskCacheConfig | None, base: str, check: Check) -> DiskCache | None:
    """Returns the disk cache. Returns None without a config or when the directory is unusable; the node then serves
    without a cache."""
    if config is None or not config.bytes:
        return None
    try:
        return DiskCache(config, base, check)
    except OSError as error:
        log.warning(
            "the disk cache is off: its directory can't be used", extra={"path": config.path, "reason": error.strerror}
        )
        return None


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
