"""Registry of functions, versions and aliases, as objects in a store that any number of writers share.

A version exists only once function.json lists it, so a writer that dies before leaves nothing visible. Layout:

    blobs/sha256/<hex>                                    original files, immutable
    artifacts/v1/<base-fingerprint>/<digest>              serving artifacts, immutable
    bases/v2/<base-fingerprint>.json                      manifests of bases that only vLLM serves
    tenants/<tenant>/functions/<name>/function.json       FunctionRecord, by compare-and-swap
    tenants/<tenant>/functions/<name>/versions/<n>.json   Manifest, immutable
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from adapters.artifact import artifact_key
from adapters.base_model import BaseModel
from adapters.choices import Choice, Resolved, pick
from adapters.contents import Contents, Inspect
from adapters.deployment import AdapterUpload, Deployment, Staged, deployment_of
from adapters.errors import (
    ArtifactPending,
    CorruptFunction,
    CorruptRecord,
    InvalidAdapter,
    InvalidRequest,
    NoSuchFunction,
    NotCallable,
    NotFound,
    StoreUnavailable,
)
from adapters.function_changes import FunctionChanges, check_options
from adapters.functions import (
    BrokenFunction,
    FunctionRecord,
    Manifest,
    VersionEntry,
    parse_policy,
    policy_of,
    tombstoned,
    with_own_defaults,
    with_version,
    without_version,
)
from adapters.inspector import inspect_once
from adapters.names import NAME_RULE, is_name
from adapters.nearest import did_you_mean
from adapters.quota import Quota
from adapters.records import find_record, read_each, read_records
from adapters.schedules import record_schedule
from adapters.standing import Memory, function_key, update_function
from adapters.store import MAX_LIST, ObjectStore
from adapters.validate import LoraLayout, check_values, within_limit
from adapters.version_files import Storing, VersionFiles, find_digest, manifest_key

MAX_PASSED = 1000
"""Maximum number of deleted functions that one page of a list skips, in addition to its page size."""


class Registry:
    """Registry of all tenants' functions for one base model. Methods block, and may be called from any thread."""

    def __init__(self, store: ObjectStore, base: BaseModel, inspect: Inspect | None = None) -> None:
        """Creates a registry on `store`. `inspect` reads adapters' configs and headers. By default the calling thread
        does it without a limit of memory, which is only for files from trusted sources."""
        self.store = store
        self.base = base
        self._inspect: Inspect = inspect or partial(inspect_once, base=base)
        self.contents = Contents(store, base, self._inspect)
        self.changes = FunctionChanges(store)
        self.quota = Quota(store)
        self._versions = VersionFiles(store, base, self.contents)

    def check(self, upload: AdapterUpload, name: str = "") -> Deployment:
        """Returns the result that a deploy of the files would have, without writing anything. Does not access the
        store. Raises what `deploy` raises for its arguments and files."""
        if name:
            self._check_name(name)
        return deployment_of(name, None, self._layout(upload), created=False, notes=upload.version_defaults.notes)

    def stage(self, tenant: str, name: str, upload: AdapterUpload) -> Staged:
        """Stores the files of a deploy without listing the version, so that no call can use it yet. Garbage collection
        removes them if they are not deployed afterwards. Raises what `deploy` does."""
        self._check_name(name)
        _check_tenant(tenant)
        layout = self._layout(upload)
        record = self._read(tenant, name) or FunctionRecord(name=name, created=time.time())
        with self.quota.deploying(tenant, name) as room:
            deploy = Storing(upload, layout, room)
            entry = self._versions.listed(tenant, record, deploy)
        deployment = deployment_of(
            name, entry.version, layout, created=deploy.created, notes=upload.version_defaults.notes
        )
        return Staged(deployment, layout, deploy.manifest, self._resolved(record, entry))

    def deploy(
        self,
        tenant: str,
        name: str,
        upload: AdapterUpload,
        staged: Staged | None = None,
        memory: Memory | None = None,
    ) -> Deployment:
        """Stores an adapter as a version of a function, and points an alias (`latest` by default) to it.

        An adapter that the function has already makes no new version; only the alias moves. `staged`: result of `stage`
        for the same arguments. `memory`: limits for the provisioned copies that the policy requests. Raises
        InvalidRequest (name, alias, policy), InvalidAdapter, TooLarge, InspectionBusy or StoreUnavailable. Raises
        Conflict when the function has too many versions or aliases, the tenant has too many adapters, or the policy
        requests more than is available.
        """
        self._check_name(name)
        _check_tenant(tenant)
        layout = staged.layout if staged is not None else self._layout(upload)

        def commit(record: FunctionRecord | None) -> FunctionRecord:
            room.may_be_listed = False  # an earlier attempt has lost a race
            record = record or FunctionRecord(name=name, created=time.time())
            entry = self._versions.listed(tenant, record, deploy)
            record, entry = with_own_defaults(record, entry, upload.version_defaults)
            changed = msgspec.structs.replace(record, policy=parse_policy(upload.policy or {}, record.policy))
            if changed.policy.warm:
                record_schedule(self.store, tenant, name)
            listed = with_version(changed, entry, upload.alias or "latest", time.time())
            room.may_be_listed = deploy.created
            return listed

        with self.quota.deploying(tenant, name) as room:
            deploy = Storing(upload, layout, room, None if staged is None else staged.manifest)
            record = update_function(self.store, tenant, name, commit, memory)
            if deploy.created:
                room.commit()
        self._end_if_deleted(tenant, name)
        entry = find_digest(record, layout.digest)
        version = entry.version if entry else None
        return deployment_of(name, version, layout, created=deploy.created, notes=upload.version_defaults.notes)

    def resolve(self, tenant: str, name: str, qualifier: str | None = None, point: float = 0.0) -> Resolved:
        """Returns the version that a call gets now. `point` in [0, 1) selects a version of a split alias.

        Builds the version's artifact if there is none. Raises NotFound, StoreUnavailable or CorruptArtifact, or
        InvalidAdapter if the base was changed and the adapter does not fit the new one.
        """
        try:
            return pick(self.choices(tenant, name, qualifier), point)
        except ArtifactPending as pending:
            self.make_artifact(tenant, name, pending.version)
        return pick(self.choices(tenant, name, qualifier), point)

    def choices(self, tenant: str, name: str, qualifier: str | None = None) -> Sequence[Choice]:
        """Returns the versions, with their shares of the calls, that `qualifier` refers to now, ascending. `qualifier`:
        an alias, a version number, or None for `latest`.

        Raises NotFound or StoreUnavailable.
        """
        record = self.function(tenant, name)
        name_or_number = "latest" if qualifier is None else qualifier
        weights = record.aliases[name_or_number].weights if name_or_number in record.aliases else {name_or_number: 1.0}
        entries = [entry for entry in record.versions if str(entry.version) in weights]
        if len(entries) != len(weights):
            hint = did_you_mean(name_or_number, record.aliases)
            problem = f"function {name} has no version or alias {name_or_number[:100]!r}{hint}"
            raise NotCallable(f"{name}:{name_or_number}", problem)
        return [self._choice(record, entry, weights[str(entry.version)]) for entry in entries]

    def function(self, tenant: str, name: str) -> FunctionRecord:
        """Returns the function's record. Raises NotFound."""
        record = self._read(tenant, name) if is_name(name) and is_name(tenant) else None
        if record is None or record.deleted:
            raise NoSuchFunction(tenant, name)
        return record

    def functions(
        self, tenant: str, after: str = "", limit: int = 100
    ) -> tuple[list[FunctionRecord | BrokenFunction], str | None]:
        """Returns a page of the tenant's functions in a fixed order, and the `after` of the next page (None: there is
        none).

        Deleted functions are skipped, MAX_PASSED at most; beyond that a page ends early, or is empty.
        """
        _check_tenant(tenant)
        limit, records = min(limit, MAX_LIST), list[FunctionRecord | BrokenFunction]()
        for size in (limit, MAX_PASSED):
            names = self.store.folders(f"tenants/{tenant}/functions/", after, size)
            first = 0
            while first < len(names):
                batch = names[first : first + max(limit - len(records), self.store.readers)]
                results = read_each(self.store, [function_key(tenant, name) for name in batch], FunctionRecord)
                for after, record in zip(batch, results, strict=True):
                    if isinstance(record, CorruptRecord):
                        records.append(BrokenFunction(after, str(CorruptFunction(after))))
                    elif record is not None and not record.deleted:
                        records.append(record)
                    if len(records) == limit:
                        return records, after
                first += len(batch)
            if len(names) < size:
                return records, None
        return records, after

    def names(self, tenant: str, after: str = "", limit: int = MAX_LIST) -> Sequence[str]:
        """Returns a page of the tenant's function names in a fixed order, including deleted functions whose objects
        remain."""
        _check_tenant(tenant)
        return self.store.folders(f"tenants/{tenant}/functions/", after, limit)

    def manifest(self, tenant: str, name: str, version: int) -> Manifest:
        """Returns the manifest of one version. Raises NotFound unless the function lists that version."""
        if all(entry.version != version for entry in self.function(tenant, name).versions):
            raise NotFound(f"function {name} has no version {version}")
        return self._manifest(tenant, name, version)

    def versions(self, tenant: str, name: str) -> list[Manifest]:
        """Returns the manifests of all versions, ascending. Raises NotFound."""
        listed = [entry.version for entry in self.function(tenant, name).versions]
        manifests = read_records(self.store, [manifest_key(tenant, name, version) for version in listed], Manifest)
        return [_present(name, version, manifest) for version, manifest in zip(listed, manifests, strict=True)]

    def delete_version(self, tenant: str, name: str, version: int, matches: Collection[int] | None = None) -> None:
        """Removes a version, which no alias may name, from the function's list. Its objects are left to garbage
        collection, and its number is not reused. Raises NotFound, Conflict or PreconditionFailed (as in
        FunctionChanges)."""

        def remove(record: FunctionRecord) -> FunctionRecord:
            changed = without_version(record, version, self.store.now())
            freed.set(1, sum(entry.bytes for entry in record.versions if entry.version == version))
            return changed

        with self.quota.removing(tenant) as freed:
            self.changes.change(tenant, name, matches, remove)

    def delete_function(self, tenant: str, name: str, matches: Collection[int] | None = None) -> None:
        """Deletes the function, which disappears at once. Its objects are left to garbage collection.

        Raises NotFound or PreconditionFailed (as in FunctionChanges).
        """

        def bury(record: FunctionRecord) -> FunctionRecord:
            freed.set(len(record.versions), sum(entry.bytes for entry in record.versions))
            return tombstoned(record, self.store.now())

        with self.quota.removing(tenant) as freed:
            self.changes.change(tenant, name, matches, bury)

    def _end_if_deleted(self, tenant: str, name: str) -> None:
        """Deletes the function just deployed, and raises NotFound, if its tenant has been deleted. A deletion of the
        tenant that began before the deploy may have missed the function, which would then belong to the next tenant of
        this name."""
        try:
            self.quota.check(tenant)
        except NotFound:
            with suppress(NotFound):  # the tenant's deletion did not miss it
                self.delete_function(tenant, name)
            raise

    def make_artifact(self, tenant: str, name: str, version: int) -> str:
        """Builds a version's artifact for the current base from its files, unless an intact one exists. Slow. Returns
        the problem of the existing artifact; "" if it was intact.

        Raises InvalidAdapter, CorruptArtifact or StoreUnavailable.
        """
        return self.contents.ensure_artifact(self._manifest(tenant, name, version))

    def _choice(self, record: FunctionRecord, entry: VersionEntry, share: float) -> Choice:
        resolved = self._resolved(record, entry)
        failure = self.contents.failure(entry.digest)
        if failure is not None and isinstance(failure.error, InvalidAdapter):
            return Choice(share, resolved, refused=tuple(failure.error.problems))
        if failure is not None:
            return Choice(share, resolved, damaged=str(failure.error), pending=failure.expired)
        pending = entry.base != self.base.fingerprint and not self.contents.is_ready(entry.digest)
        return Choice(share, resolved, pending=pending)

    def _resolved(self, record: FunctionRecord, entry: VersionEntry) -> Resolved:
        key = artifact_key(self.base.fingerprint, entry.digest) if self.base.has_artifacts else ""
        return Resolved(
            function=record.name,
            version=entry.version,
            digest=entry.digest,
            artifact_key=key,
            ranks=entry.ranks,
            bytes=entry.bytes,
            policy=policy_of(record, entry),
            itemsize=entry.itemsize,
            config_sha256=entry.config_sha256,
            weights_sha256=entry.weights_sha256,
        )

    def _check_name(self, name: str) -> None:
        if not is_name(name):
            raise InvalidRequest("name", f"malformed function name {name[:100]!r}: {NAME_RULE}")
        if name == self.base.id:
            raise InvalidRequest("name", f"{name!r} is the base model's id")

    def _layout(self, upload: AdapterUpload) -> LoraLayout:
        """Returns the layout of the checked upload. Raises what `deploy` does for its arguments and files."""
        check_options(upload.alias, upload.policy)
        inspection = self._inspect(upload.config, upload.weights)
        return check_values(within_limit(inspection, upload.rank_limit), upload.weights)

    def _read(self, tenant: str, name: str) -> FunctionRecord | None:
        try:
            return find_record(self.store, function_key(tenant, name), FunctionRecord)
        except CorruptRecord:
            raise CorruptFunction(name) from None

    def _manifest(self, tenant: str, name: str, version: int) -> Manifest:
        return _present(name, version, find_record(self.store, manifest_key(tenant, name, version), Manifest))


def _present(name: str, version: int, manifest: Manifest | None) -> Manifest:
    if manifest is None:
        raise StoreUnavailable(f"the manifest of version {version} of {name} is missing from the registry")
    return manifest


def _check_tenant(tenant: str) -> None:
    if not is_name(tenant):
        raise InvalidRequest("tenant", f"malformed tenant name {tenant[:100]!r}")
