"""Functions, versions and aliases as objects in a store; any number of writers, one truth.

A version exists only once function.json lists it, so whatever dies in between leaves nothing visible. Layout:

    blobs/sha256/<hex>                                    original files, immutable
    artifacts/v1/<base-fingerprint>/<digest>              serving artifacts, immutable
    tenants/<tenant>/functions/<name>/function.json       FunctionRecord, by compare-and-swap
    tenants/<tenant>/functions/<name>/versions/<n>.json   Manifest, immutable
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from adapters.artifact import artifact_key, write_artifact
from adapters.base_model import BaseModel
from adapters.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from adapters.functions import FunctionRecord, Manifest, Policy, VersionEntry, parse_policy, with_version
from adapters.names import is_alias, is_name
from adapters.peft_format import read_peft
from adapters.records import read_record, update_record
from adapters.store import ObjectStore
from adapters.validate import LoraLayout, validate

MAX_ORPHANS = 1000
"""Numbers in a row that a deploy skips because deploys that failed, or still run, took them."""
REWRITE_SECONDS = 12 * 3600.0
"""Age at which a blob that a deploy meets is written anew, well before the 24 h at which orphans may be removed."""
NAME_RULE = "1 to 64 of a-z, 0-9, '.', '_' and '-', starting and ending with a letter or digit"


class _Files(msgspec.Struct, frozen=True):
    config: bytes
    weights: Path
    source: str | None


class Deployment(msgspec.Struct, frozen=True):
    """What a deploy did, or (version None) what a dry run would do."""

    function: str
    version: int | None
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...]
    created: bool
    """Whether a new version was made; False when this adapter was deployed under this name before, and in a dry run."""


class Resolved(msgspec.Struct, frozen=True):
    """One version of a function, ready to be sent to a node."""

    function: str
    version: int
    digest: str
    artifact_key: str
    ranks: tuple[int, ...]
    bytes: int
    policy: Policy


class Registry:
    """The functions of all tenants for one base model. Methods block; they may be called from any thread."""

    def __init__(self, store: ObjectStore, base: BaseModel) -> None:
        self.store = store
        self.base = base
        self._remake = threading.Lock()

    def check(self, config: bytes, weights: Path, name: str = "") -> Deployment:
        """What a deploy would find, without writing anything. Raises as `deploy` does."""
        if name:
            self._check_name(name)
        layout = validate(read_peft(config, weights), self.base)
        return _deployment(name, None, layout, created=False)

    def deploy(
        self,
        tenant: str,
        name: str,
        config: bytes,
        weights: Path,
        alias: str | None = None,
        policy: dict[str, Any] | None = None,
        source: str | None = None,
    ) -> Deployment:
        """Store an adapter as a version of a function and point an alias (`latest`) to it.

        `weights` must not change meanwhile. The same adapter again makes no new version and only moves the alias.
        Raises InvalidRequest (name, alias, policy), InvalidAdapter, TooLarge, StoreUnavailable.
        """
        self._check_name(name)
        _check_tenant(tenant)
        if alias is not None and not is_alias(alias):
            raise InvalidRequest("alias", f"malformed alias {alias[:100]!r}: {NAME_RULE}, not all digits")
        parse_policy(policy or {}, Policy())
        layout = validate(read_peft(config, weights), self.base)
        files = _Files(config=config, weights=weights, source=source)
        return self._commit(tenant, name, layout, files, alias or "latest", policy or {})

    def resolve(self, tenant: str, name: str, qualifier: str | None = None) -> Resolved:
        """The version that `qualifier` (an alias, a version number, or None for `latest`) names now.

        Raises NotFound, StoreUnavailable, and InvalidAdapter if the base was changed and this adapter does not fit.
        """
        record = self.function(tenant, name)
        wanted = qualifier or "latest"
        if wanted in record.aliases:
            wanted = max(record.aliases[wanted].weights.items(), key=lambda item: item[1])[0]
        entry = next((entry for entry in record.versions if str(entry.version) == wanted), None)
        if entry is None:
            raise NotFound(f"function {name} has no version or alias {wanted[:100]!r}")
        if entry.base != self.base.fingerprint:
            self._ensure_artifact(tenant, name, entry)
        return Resolved(
            function=name,
            version=entry.version,
            digest=entry.digest,
            artifact_key=artifact_key(self.base.fingerprint, entry.digest),
            ranks=entry.ranks,
            bytes=entry.bytes,
            policy=record.policy,
        )

    def function(self, tenant: str, name: str) -> FunctionRecord:
        """The function's record. Raises NotFound."""
        found = self._read(tenant, name) if is_name(name) and is_name(tenant) else None
        if found is None or found.deleted:
            raise NotFound(f"there is no function {name[:100]!r}")
        return found

    def functions(self, tenant: str, after: str = "", limit: int = 100) -> tuple[list[FunctionRecord], str | None]:
        """A page of the tenant's functions in a fixed order, and the `after` of the next page if there may be one."""
        _check_tenant(tenant)
        records: list[FunctionRecord] = []
        while True:
            names = self.store.folders(f"tenants/{tenant}/functions/", after, limit)
            for name in names:
                after = name
                found = self._read(tenant, name)
                if found is not None and not found.deleted:
                    records.append(found)
                if len(records) == limit:
                    return records, after
            if len(names) < limit:
                return records, None

    def manifest(self, tenant: str, name: str, version: int) -> Manifest:
        """One version's manifest. Raises NotFound unless the function lists that version."""
        if all(entry.version != version for entry in self.function(tenant, name).versions):
            raise NotFound(f"function {name} has no version {version}")
        return msgspec.json.decode(self.store.get(_manifest_key(tenant, name, version)).data, type=Manifest)

    def versions(self, tenant: str, name: str) -> list[Manifest]:
        """The manifests of all versions, ascending. Raises NotFound."""
        entries = self.function(tenant, name).versions
        keys = [_manifest_key(tenant, name, entry.version) for entry in entries]
        return [msgspec.json.decode(self.store.get(key).data, type=Manifest) for key in keys]

    def delete_function(self, tenant: str, name: str) -> None:
        """Make the function invisible at once; its objects are left to garbage collection. Raises NotFound."""

        def bury(record: FunctionRecord | None) -> FunctionRecord:
            if record is None or record.deleted:
                raise NotFound(f"there is no function {name!r}")
            return msgspec.structs.replace(
                record, generation=record.generation + 1, deleted=True, policy=Policy(), versions=(), aliases={}
            )

        self.function(tenant, name)
        update_record(self.store, _function_key(tenant, name), FunctionRecord, bury)

    def _check_name(self, name: str) -> None:
        if not is_name(name):
            raise InvalidRequest("name", f"malformed function name {name[:100]!r}: {NAME_RULE}")
        if name == self.base.id:
            raise InvalidRequest("name", f"{name!r} is the base model's id")

    def _read(self, tenant: str, name: str) -> FunctionRecord | None:
        found = read_record(self.store, _function_key(tenant, name), FunctionRecord)
        return found[0] if found else None

    def _put_blob(self, sha256: str, data: bytes | Path) -> None:
        self._put_immutable(f"blobs/sha256/{sha256}", data)

    def _put_artifact(self, layout: LoraLayout, weights: Path) -> None:
        key = artifact_key(self.base.fingerprint, layout.digest)
        if self._is_fresh(key):
            return
        with tempfile.TemporaryDirectory(prefix="garnish-artifact-") as folder:
            out = Path(folder) / "artifact"
            write_artifact(layout, self.base, weights, out)
            self._put_immutable(key, out)

    def _is_fresh(self, key: str) -> bool:
        info = self.store.head(key)
        return info is not None and time.time() - info.modified < REWRITE_SECONDS

    def _put_immutable(self, key: str, data: bytes | Path) -> None:
        """Write content whose key is its hash; an old copy is written anew, for it may be an orphan about to go."""
        if self._is_fresh(key):
            return
        if self.store.head(key) is not None:
            self.store.put(key, data)
            return
        try:
            self.store.put_if_absent(key, data)
        except Conflict:
            return  # another deploy of the same content was faster

    def _commit(
        self,
        tenant: str,
        name: str,
        layout: LoraLayout,
        files: _Files,
        alias: str,
        policy: dict[str, Any],
    ) -> Deployment:
        number: int | None = None
        created = False

        def commit(record: FunctionRecord | None) -> FunctionRecord:
            nonlocal number, created
            record = record or FunctionRecord(name=name, created=time.time())
            existing = _find_digest(record, layout.digest)
            created = existing is None
            if existing is not None:
                if self.store.head(artifact_key(self.base.fingerprint, layout.digest)) is None:
                    self._put_artifact(layout, files.weights)
                number = existing.version
            elif number is None:
                self._put_blob(hashlib.sha256(files.config).hexdigest(), files.config)
                self._put_blob(layout.weights_sha256, files.weights)
                self._put_artifact(layout, files.weights)
                number = self._put_manifest(tenant, record, layout, files)
            entry = _entry(number, layout, self.base.fingerprint, existing.created if existing else time.time())
            changed = msgspec.structs.replace(record, policy=parse_policy(policy, record.policy))
            return with_version(changed, entry, alias, time.time())

        record = update_record(self.store, _function_key(tenant, name), FunctionRecord, commit)
        entry = _find_digest(record, layout.digest)
        return _deployment(name, entry.version if entry else None, layout, created=created)

    def _put_manifest(self, tenant: str, record: FunctionRecord, layout: LoraLayout, files: _Files) -> int:
        """Take the next free number by writing its manifest; numbers of orphans are skipped."""
        for number in range(record.next_version, record.next_version + MAX_ORPHANS):
            manifest = Manifest(
                function=record.name,
                version=number,
                digest=layout.digest,
                base=self.base.fingerprint,
                base_id=self.base.id,
                config_sha256=hashlib.sha256(files.config).hexdigest(),
                weights_sha256=layout.weights_sha256,
                dtype=layout.dtype,
                ranks=layout.ranks,
                targets=layout.targets,
                bytes=layout.bytes,
                warnings=layout.warnings,
                created=time.time(),
                source=files.source,
            )
            try:
                self.store.put_if_absent(_manifest_key(tenant, record.name, number), msgspec.json.encode(manifest))
            except Conflict:
                continue
            return number
        raise StoreUnavailable(f"function {record.name} has too many unfinished versions; remove them first")

    def _ensure_artifact(self, tenant: str, name: str, entry: VersionEntry) -> None:
        """Make the artifact for the present base from the stored files, if it does not exist. Raises InvalidAdapter."""
        key = artifact_key(self.base.fingerprint, entry.digest)
        if self.store.head(key) is not None:
            return
        with self._remake, tempfile.TemporaryDirectory(prefix="garnish-remake-") as folder:
            if self.store.head(key) is not None:
                return
            manifest = self.manifest(tenant, name, entry.version)
            weights = Path(folder) / "weights"
            self._fetch_blob(manifest.weights_sha256, weights)
            config = self.store.get(f"blobs/sha256/{manifest.config_sha256}").data
            self._put_artifact(validate(read_peft(config, weights), self.base), weights)

    def _fetch_blob(self, sha256: str, out: Path) -> None:
        start = 0
        with out.open("wb") as stream:
            while data := self.store.get_range(f"blobs/sha256/{sha256}", start, 8 << 20):
                stream.write(data)
                start += len(data)


def _function_key(tenant: str, name: str) -> str:
    return f"tenants/{tenant}/functions/{name}/function.json"


def _manifest_key(tenant: str, name: str, version: int) -> str:
    return f"tenants/{tenant}/functions/{name}/versions/{version}.json"


def _check_tenant(tenant: str) -> None:
    if not is_name(tenant):
        raise InvalidRequest("tenant", f"malformed tenant name {tenant[:100]!r}")


def _find_digest(record: FunctionRecord, digest: str) -> VersionEntry | None:
    return next((entry for entry in record.versions if entry.digest == digest), None)


def _entry(version: int, layout: LoraLayout, base: str, created: float) -> VersionEntry:
    return VersionEntry(version, layout.digest, base, layout.ranks, layout.targets, layout.bytes, created)


def _deployment(name: str, version: int | None, layout: LoraLayout, *, created: bool) -> Deployment:
    return Deployment(
        function=name,
        version=version,
        digest=layout.digest,
        ranks=layout.ranks,
        targets=layout.targets,
        bytes=layout.bytes,
        warnings=layout.warnings,
        created=created,
    )
