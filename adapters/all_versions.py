"""Iteration over every version in a registry, listed or not, for garbage collection and verification.

Objects are read one page at a time, so that memory does not grow with the number of functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from adapters.errors import NotFound
from adapters.functions import FunctionRecord, Manifest, VersionEntry
from adapters.records import decoded, find_record
from adapters.store import MAX_LIST, ObjectInfo, ObjectStore

_OBJECT = re.compile(r"([^/]+)/(?:function|versions/(\d+))\.json", re.ASCII)


class FoundVersion(msgspec.Struct, frozen=True):
    """A version in the store: a manifest, or a listed version without one."""

    tenant: str
    function: str
    version: int
    entry: VersionEntry | None
    """Entry of function.json; None: the function does not list the version, so no call can use it."""
    manifest: Manifest | None
    info: ObjectInfo | None
    """Size and time of the manifest's object; None: there is no manifest."""
    removed: float = 0.0
    """Unix time (store's clock) at which the function removed the version from its list; 0: not recently."""

    @property
    def name(self) -> str:
        """Name of the version as `tenant/function:version`."""
        return f"{self.tenant}/{self.function}:{self.version}"

    @property
    def key(self) -> str:
        """Object key of the version's manifest."""
        return f"{_folder(self.tenant)}{self.function}/versions/{self.version}.json"


def all_versions(store: ObjectStore) -> Iterator[FoundVersion]:
    """Yields every version of every function in the store. Raises StoreUnavailable, also for an unreadable
    function.json, whose versions would seem unlisted."""
    with ThreadPoolExecutor(store.readers, "registry") as pool:
        after = ""
        while names := store.folders("tenants/", after):
            for tenant in names:
                yield from _of_tenant(store, tenant, pool)
            after = names[-1]


def is_listed(store: ObjectStore, version: FoundVersion) -> bool:
    """Returns whether the function lists the version now, by reading function.json. Raises StoreUnavailable."""
    record = find_record(store, f"{_folder(version.tenant)}{version.function}/function.json", FunctionRecord)
    return record is not None and any(entry.version == version.version for entry in record.versions)


class _Function:
    """A function whose manifests are being read. `unmet` has its listed versions whose manifests have not been read
    yet."""

    def __init__(self, tenant: str, name: str) -> None:
        self.tenant = tenant
        self.name = name
        self.unmet: dict[int, VersionEntry] = {}
        self.removed: dict[str, float] = {}

    def met(self, version: int, info: ObjectInfo, data: bytes) -> FoundVersion:
        """Returns the version whose manifest was read: `version` is its number, and `data` the manifest. Removes it
        from `unmet`."""
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError:
            manifest = None
        entry = self.unmet.pop(version, None)
        removed = self.removed.get(str(version), 0.0)
        return FoundVersion(self.tenant, self.name, version, entry, manifest, info, removed)

    def rest(self, store: ObjectStore) -> Iterator[FoundVersion]:
        """Yields the listed versions whose manifest was not in the listing: those deployed since, and those without a
        manifest. Versions deleted meanwhile are left out."""
        for version, entry in self.unmet.items():
            unmet = FoundVersion(self.tenant, self.name, version, entry, None, None)
            info = store.head(unmet.key)
            if info is None:
                if is_listed(store, unmet):
                    yield unmet
                continue
            yield msgspec.structs.replace(unmet, manifest=find_record(store, unmet.key, Manifest), info=info)


def _of_tenant(store: ObjectStore, tenant: str, pool: ThreadPoolExecutor) -> Iterator[FoundVersion]:
    """Yields every version of a tenant. In key order, a function's function.json directly precedes its manifests."""
    current: _Function | None = None
    for info, data in _contents(store, _folder(tenant), pool):
        parsed = _OBJECT.fullmatch(info.key.removeprefix(_folder(tenant)))
        if parsed is None or data is None:
            continue
        if current is None or current.name != parsed[1]:
            if current is not None:
                yield from current.rest(store)
            current = _Function(tenant, parsed[1])
        if parsed[2] is None:
            record = decoded(data, info.key, FunctionRecord)
            current.unmet = {entry.version: entry for entry in record.versions}
            current.removed = record.removed
        else:
            yield current.met(int(parsed[2]), info, data)
    if current is not None:
        yield from current.rest(store)


def _contents(store: ObjectStore, prefix: str, pool: ThreadPoolExecutor) -> Iterator[tuple[ObjectInfo, bytes | None]]:
    """Yields the objects below the prefix with their content; None for one that was deleted after it was listed."""

    def read(info: ObjectInfo) -> bytes | None:
        try:
            return store.get(info.key).data
        except NotFound:
            return None

    after = ""
    while page := store.list(prefix, after, MAX_LIST):
        yield from zip(page, pool.map(read, page), strict=True)
        after = page[-1].key


def _folder(tenant: str) -> str:
    return f"tenants/{tenant}/functions/"
