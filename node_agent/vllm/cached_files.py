"""Adapters' original files in the disk cache of a node that drives vLLM.

A file of the cache has a head, the adapter's config, and its weights. The head names both files by their SHA-256, which
is checked when they are read. The head itself is checked by a separate hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from adapters.errors import AdapterError, CorruptArtifact
from cluster.messages import Adapter
from node_agent.adapter_memory.disk_cache import CachedFile, CacheWriter, DiskCache

MAGIC = b"GARNPEFT"
PREFIX = len(MAGIC) + 4 + 32
"""Number of bytes before the head: MAGIC, the head's length (u32 little-endian), and the head's SHA-256."""
MAX_HEAD_BYTES = 1 << 12


class Head(msgspec.Struct, frozen=True):
    """Names of an adapter and of its two files, and the bytes of the files."""

    digest: str
    base: str
    config: str
    weights: str
    config_bytes: int
    weights_bytes: int
    v: int = 1


@dataclass(frozen=True)
class CachedAdapter:
    """Adapter's files in the disk cache. They may vanish at any time."""

    file: CachedFile
    head: Head
    start: int
    """offset of the config in the cache's file"""

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of config and weights."""
        return self.head.config_bytes, self.head.weights_bytes

    def config(self) -> bytes:
        """Reads the config. Raises CorruptArtifact."""
        return self._read(self.start, self.head.config_bytes)

    def weights(self, offset: int, length: int) -> bytes:
        """Reads a part of the weights. Raises CorruptArtifact."""
        return self._read(self.start + self.head.config_bytes + offset, length)

    def _read(self, offset: int, length: int) -> bytes:
        try:
            data = self.file.get_range("", offset, length)
        except OSError as error:
            raise CorruptArtifact(f"the file can't be read: {error.strerror or error}") from error
        if len(data) != length:
            raise CorruptArtifact("the file ends early")
        return data


def is_intact(file: CachedFile, size: int) -> bool:
    """Returns whether the file has an adapter's original files, is named for it, and ends with the weights. Raises
    CorruptArtifact or OSError."""
    head, start = _read_head(file)
    return f"{head.digest}-{head.base}" == file.path.name and start + head.config_bytes + head.weights_bytes == size


def find(cache: DiskCache, adapter: Adapter) -> CachedAdapter | None:
    """Returns the adapter's files; None if they are not there. Drops them from the cache if they are not those that the
    registry names."""
    file = cache.open(adapter.digest)
    if file is None:
        return None
    try:
        head, start = _read_head(file)
        if (head.digest, head.config, head.weights) != (adapter.digest, adapter.config, adapter.weights):
            raise CorruptArtifact("it has other files than the registry names")
    except (AdapterError, OSError) as error:
        file.drop(str(error))
        return None
    return CachedAdapter(file, head, start)


class FilesWriter:
    """Writes an adapter's original files to the disk cache while they are fetched."""

    def __init__(self, cache: DiskCache, adapter: Adapter, sizes: tuple[int, int], pieces: int) -> None:
        """`sizes`: bytes of config and weights. `pieces`: number of parts in which the weights are written."""
        head = Head(adapter.digest, cache.base, adapter.config, adapter.weights, *sizes)
        encoded = _encode_head(head)
        self._start = len(encoded)
        self._config_bytes = sizes[0]
        self._writer: CacheWriter | None = cache.writer(adapter.digest, encoded, len(encoded) + sum(sizes), 1 + pieces)

    def write_config(self, data: bytes) -> None:
        if self._writer is not None:
            self._writer.write(self._start, data)

    def write_weights(self, offset: int, data: bytes) -> None:
        """Writes a part of the weights. The last part may be written only once all are verified."""
        if self._writer is not None:
            self._writer.write(self._start + self._config_bytes + offset, data)

    def end(self) -> None:
        """Ends the writer. An incomplete file is removed."""
        if self._writer is not None:
            self._writer.end()


def _encode_head(head: Head) -> bytes:
    data = msgspec.json.encode(head)
    return MAGIC + len(data).to_bytes(4, "little") + hashlib.sha256(data).digest() + data


def _read_head(file: CachedFile) -> tuple[Head, int]:
    """Returns the head, and the offset after it. Raises CorruptArtifact or OSError."""
    data = file.get_range("", 0, PREFIX + MAX_HEAD_BYTES)
    end = PREFIX + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    if data[: len(MAGIC)] != MAGIC or end > len(data):
        raise CorruptArtifact("it has no original files of an adapter")
    if hashlib.sha256(data[PREFIX:end]).digest() != data[len(MAGIC) + 4 : PREFIX]:
        raise CorruptArtifact("its head differs from what was written")
    try:
        head = msgspec.json.decode(data[PREFIX:end], type=Head)
    except msgspec.DecodeError as error:
        raise CorruptArtifact(f"its head can't be read: {error}") from None
    if head.v != 1 or min(head.config_bytes, head.weights_bytes) < 0:
        raise CorruptArtifact("its head is of another version")
    return head, end
