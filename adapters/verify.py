"""Verification of a registry: every listed file and artifact is read and hashed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from adapters.all_versions import FoundVersion, all_versions, is_listed
from adapters.artifact import artifact_key, artifact_problem, blob_problem
from adapters.blobs import blob_key
from adapters.disk_map import DiskMap
from adapters.functions import Manifest, VersionEntry
from adapters.store import ObjectStore


class Damage(msgspec.Struct, frozen=True):
    """A damaged object that a listed version needs, and its problem."""

    version: str
    """Version as `tenant/function:version`."""
    key: str
    problem: str


class Verified(msgspec.Struct):
    """Counts of a verification."""

    versions: int = 0
    objects: int = 0
    """Number of manifests, files and artifacts read; shared ones count once."""
    damaged: int = 0
    """Number of versions with damage."""


def verify(
    store: ObjectStore,
    *,
    on_damage: Callable[[Damage], None] = lambda _: None,
    progress: Callable[[FoundVersion], None] = lambda _: None,
) -> Verified:
    """Reads all listed objects, and returns the counts. `on_damage` is called with each damage, `progress` with each
    version. Raises StoreUnavailable."""
    done = Verified()
    with DiskMap() as checked:
        for version in all_versions(store):
            if version.entry is None:
                continue
            progress(version)
            done.versions += 1
            done.objects += 1
            damages = list(_damages(store, version, version.entry, checked, done))
            # The files of a version deleted meanwhile may have been collected.
            if damages and is_listed(store, version):
                done.damaged += 1
                for damage in damages:
                    on_damage(damage)
    return done


def _damages(
    store: ObjectStore, version: FoundVersion, entry: VersionEntry, checked: DiskMap, done: Verified
) -> Iterator[Damage]:
    if version.manifest is None:
        problem = "is missing" if version.info is None else "is no manifest"
        yield Damage(version.name, version.key, problem)
        return
    if version.manifest.digest != entry.digest:
        yield Damage(
            version.name, version.key, f"names the digest {version.manifest.digest}, the function {entry.digest}"
        )
    for key, check in _contents(version.manifest, entry):
        cached = checked.get(key)
        problem = check(store) if cached is None else cached
        if cached is None:
            checked.put(key, problem)
            done.objects += 1
        if problem:
            yield Damage(version.name, key, problem)


def _contents(manifest: Manifest, entry: VersionEntry) -> Iterator[tuple[str, Callable[[ObjectStore], str]]]:
    for sha256 in (manifest.config_sha256, manifest.weights_sha256):
        yield blob_key(sha256), partial(blob_problem, sha256=sha256)
    if entry.artifact:
        yield artifact_key(entry.base, entry.digest), partial(artifact_problem, base=entry.base, digest=entry.digest)
