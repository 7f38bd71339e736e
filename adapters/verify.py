"""Checks that a registry holds what its functions list: every file and artifact is read and hashed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from adapters.all_versions import FoundVersion, all_versions, is_listed
from adapters.artifact import artifact_key, artifact_problem, stored_sha256
from adapters.contents import blob_key
from adapters.disk_map import DiskMap
from adapters.errors import NotFound
from adapters.functions import Manifest, VersionEntry
from adapters.store import ObjectStore


class Damage(msgspec.Struct, frozen=True):
    """An object that a listed version needs, and what is wrong with it."""

    version: str
    """tenant/function:version"""
    key: str
    problem: str


class Verified(msgspec.Struct):
    versions: int = 0
    objects: int = 0
    """Manifests, files and artifacts; shared ones are read once."""
    damaged: int = 0
    """Versions with damage."""


def verify(
    store: ObjectStore,
    *,
    tell: Callable[[Damage], None] = lambda _: None,
    progress: Callable[[FoundVersion], None] = lambda _: None,
) -> Verified:
    """Reads everything that is listed, and returns the counts. `on_damage` is called with each damage, `progress` with
    each version. Raises StoreUnavailable."""
    done = Verified()
    with DiskMap() as checked:
        for found in all_versions(store):
            if found.entry is None:
                continue
            progress(found)
            done.versions += 1
            done.objects += 1
            damages = list(_damages(store, found, found.entry, checked, done))
            # Deleted and collected meanwhile, it may miss what it wants.
            if damages and is_listed(store, found):
                done.damaged += 1
                for damage in damages:
                    tell(damage)
    return done


def _damages(
    store: ObjectStore, found: FoundVersion, entry: VersionEntry, checked: DiskMap, done: Verified
) -> Iterator[Damage]:
    if found.manifest is None:
        problem = "is missing" if found.info is None else "is no manifest"
        yield Damage(found.name, found.key, problem)
        return
    if found.manifest.digest != entry.digest:
        yield Damage(found.name, found.key, f"names the digest {found.manifest.digest}, the function {entry.digest}")
    for key, check in _contents(found.manifest, entry):
        known = checked.get(key)
        problem = check(store) if known is None else known
        if known is None:
            checked.put(key, problem)
            done.objects += 1
        if problem:
            yield Damage(found.name, key, problem)


def _contents(manifest: Manifest, entry: VersionEntry) -> Iterator[tuple[str, Callable[[ObjectStore], str]]]:
    for sha256 in (manifest.config_sha256, manifest.weights_sha256):
        yield blob_key(sha256), partial(_blob_problem, sha256=sha256)
    yield artifact_key(entry.base, entry.digest), partial(artifact_problem, base=entry.base, digest=entry.digest)


def _blob_problem(store: ObjectStore, sha256: str) -> str:
    """Returns what is wrong with the object; "" when it is what it should be."""
    info = store.head(blob_key(sha256))
    if info is None:
        return "is missing"
    try:
        return "" if stored_sha256(store, info.key, 0, info.size) == sha256 else "is not what was written"
    except NotFound:
        return "is missing"
