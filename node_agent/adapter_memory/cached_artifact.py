"""Serving artifacts in the disk cache: a file is an exact copy of an artifact, and its pieces are the layers."""

from __future__ import annotations

from adapters.artifact import ArtifactHeader, encode_header, read_header
from adapters.base_model import BaseModel
from node_agent.adapter_memory.disk_cache import CachedFile, CacheWriter, DiskCache, open_cache
from node_agent.config import DiskCacheConfig


def open_artifact_cache(config: DiskCacheConfig | None, base: BaseModel) -> DiskCache | None:
    """Returns the disk cache of our own engine, as open_cache."""
    return open_cache(config, base.fingerprint, is_artifact)


def is_artifact(file: CachedFile, size: int) -> bool:
    """Returns whether the file has the artifact that it is named for, and ends with its last layer. Raises
    CorruptArtifact or OSError."""
    header = cached_header(file)
    return f"{header.digest}-{header.base}" == file.path.name and end_of(header) == size


def cached_header(file: CachedFile) -> ArtifactHeader:
    """Reads the artifact's header. Raises CorruptArtifact or OSError."""
    return read_header(file, "")


def artifact_writer(cache: DiskCache, header: ArtifactHeader) -> CacheWriter | None:
    """Returns a writer for an artifact that is being fetched, as DiskCache.writer."""
    pieces = sum(1 for block in header.layers if block.size)
    return cache.writer(header.digest, encode_header(header), end_of(header), pieces)


def end_of(header: ArtifactHeader) -> int:
    """Returns the bytes of the artifact; 0 if it has no layers."""
    return max((block.offset + block.size for block in header.layers), default=0)
