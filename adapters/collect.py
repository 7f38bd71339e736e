"""Garbage collection: removes objects that no function lists, once they are too old for a running deploy to list them.

Orphans are left by deploys that died and by deletions. The run first records everything that is listed, and then
removes objects. An error while recording means that nothing is removed.

Ages count from the start of the run. A deploy rewrites existing content that is older than half of ORPHAN_SECONDS. A
running deploy therefore does not need an unlisted object that is ORPHAN_SECONDS old at the start. Content rewritten
since then is young: each object's age is checked again before its removal. A deploy that writes between that check and
the removal finds the object missing before it lists the version, and writes it again. A recently unlisted version is
kept, because calls of it may still load it. All times are by the store's clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from adapters.all_versions import FoundVersion, all_versions
from adapters.blobs import blob_key
from adapters.contents import REWRITE_SECONDS
from adapters.disk_map import DiskMap
from adapters.errors import CorruptArtifact
from adapters.store import ObjectInfo, ObjectStore, all_objects

ORPHAN_SECONDS = 2 * REWRITE_SECONDS

_BLOB = re.compile(r"blobs/sha256/[0-9a-f]{64}", re.ASCII)
_ARTIFACT = re.compile(r"artifacts/v\d+/[^/]+/([0-9a-f]{64})", re.ASCII)


class Collected(msgspec.Struct):
    """Counts of objects removed (in a dry run: that would be removed), and of those kept."""

    dry_run: bool
    blobs: int = 0
    artifacts: int = 0
    manifests: int = 0
    bytes: int = 0
    kept: int = 0
    """Number of blobs and artifacts that are listed, or too young to be removed."""


def collect(
    store: ObjectStore,
    *,
    dry_run: bool = False,
    now: float | None = None,
    on_removal: Callable[[ObjectInfo], None] = lambda _: None,
) -> Collected:
    """Removes orphans that are at least ORPHAN_SECONDS old, and returns the counts. `now` is Unix time by the store's
    clock; None: the current time. With `dry_run` nothing is removed. `on_removal` is called for each object that is
    removed, or that a dry run would remove.

    Raises StoreUnavailable, and CorruptArtifact when a listed version has no manifest, since its files are then
    unknown.
    """
    before = (store.now() if now is None else now) - ORPHAN_SECONDS
    done = Collected(dry_run)
    with DiskMap() as needed, DiskMap() as manifests:
        for version in all_versions(store):
            _record_needs(version, before, needed, manifests)
        for kind, info in _orphans(store, before, needed, manifests, done):
            if dry_run or store.delete_older(info.key, before):
                on_removal(info)
                setattr(done, kind, getattr(done, kind) + 1)
                done.bytes += info.size
            else:
                done.kept += 1
    return done


def _record_needs(version: FoundVersion, before: float, needed: DiskMap, manifests: DiskMap) -> None:
    """Records the digest and files of the version in `needed`, or its manifest in `manifests` if no function lists the
    version. Raises CorruptArtifact when a listed version's manifest is missing or unreadable."""
    young = version.removed >= before or (version.info is not None and version.info.modified >= before)
    if version.entry is None and version.info is not None and not young:
        manifests.put(version.key, str(version.info.size))
        return
    if version.entry is not None:
        needed.put(version.entry.digest)
        if version.manifest is None:
            raise CorruptArtifact(
                f"the manifest of {version.name} is missing or can't be read, so it is not known which files it needs: "
                "nothing was removed; `garnish registry verify` names what is damaged"
            )
    if version.manifest is not None:
        needed.put(version.manifest.digest)
        needed.put(blob_key(version.manifest.config_sha256))
        needed.put(blob_key(version.manifest.weights_sha256))


def _orphans(
    store: ObjectStore, before: float, needed: DiskMap, manifests: DiskMap, done: Collected
) -> Iterator[tuple[str, ObjectInfo]]:
    for kind, prefix, pattern in (("blobs", "blobs/sha256/", _BLOB), ("artifacts", "artifacts/", _ARTIFACT)):
        for info in all_objects(store, prefix):
            matched = pattern.fullmatch(info.key)
            if matched is None:
                continue
            if info.modified >= before or needed.get(matched[matched.lastindex or 0]) is not None:
                done.kept += 1
            else:
                yield kind, info
    for key in manifests.names():
        yield "manifests", ObjectInfo(key=key, size=int(manifests.get(key) or 0), modified=before)
