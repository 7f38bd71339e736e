"""Storage of versions' files and manifests, before a function lists them."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import msgspec

from adapters.base_model import BaseModel
from adapters.contents import Contents
from adapters.deployment import AdapterUpload
from adapters.errors import Conflict, StoreUnavailable
from adapters.functions import ITEM_BYTES, FunctionRecord, Manifest, VersionEntry
from adapters.quota import QuotaReservation
from adapters.store import ObjectStore
from adapters.validate import LoraLayout

MAX_REWRITES = 10
"""Maximum number of times that a deploy stores its files again because a garbage collection was removing them."""
MAX_ORPHANS = 1000
"""Maximum number of consecutive version numbers that a deploy skips because failed or running deploys took them."""


@dataclass
class Storing:
    """A deploy in progress. `manifest` is set once the deploy has taken a version number, which it keeps through all
    attempts."""

    upload: AdapterUpload
    layout: LoraLayout
    room: QuotaReservation
    manifest: Manifest | None = None
    is_stored: bool = False
    created: bool = False


class VersionFiles:
    """Stores files and manifests of all functions' versions for one base model. Methods block."""

    def __init__(self, store: ObjectStore, base: BaseModel, contents: Contents) -> None:
        self._store, self._base, self._contents = store, base, contents

    def listed(self, tenant: str, record: FunctionRecord, deploy: Storing) -> VersionEntry:
        """Returns the entry that the record should list: the existing version with this digest, or a new one. The files
        and the manifest of a new version are stored first."""
        existing = find_digest(record, deploy.layout.digest)
        deploy.created = existing is None
        if existing is not None:
            self._contents.repair(deploy.layout, deploy.upload.config, deploy.upload.weights)
            return msgspec.structs.replace(existing, base=self._base.fingerprint, artifact=self._base.has_artifacts)
        deploy.room.take(deploy.layout.bytes)
        if deploy.manifest is None or not deploy.is_stored:
            deploy.manifest, deploy.is_stored = self._put_all(tenant, record, deploy), True
        manifest = deploy.manifest
        deploy.room.confirm()
        return VersionEntry(
            version=manifest.version,
            digest=manifest.digest,
            base=manifest.base,
            ranks=manifest.ranks,
            targets=manifest.targets,
            bytes=manifest.bytes,
            created=manifest.created,
            itemsize=ITEM_BYTES[manifest.dtype],
            config_sha256=manifest.config_sha256,
            weights_sha256=manifest.weights_sha256,
            artifact=self._base.has_artifacts,
            hold=deploy.room.hold,
        )

    def _put_all(self, tenant: str, record: FunctionRecord, deploy: Storing) -> Manifest:
        """Stores the version's files and manifest, repeatedly while a garbage collection removes some of them. Returns
        the manifest. Raises StoreUnavailable after MAX_REWRITES attempts."""
        manifest = deploy.manifest
        for _ in range(MAX_REWRITES):
            self._contents.put_files(deploy.layout, deploy.upload.config, deploy.upload.weights)
            manifest = manifest or self._put_manifest(tenant, record, deploy)
            key = manifest_key(tenant, record.name, manifest.version)
            missing = self._store.missing([*self._contents.keys(deploy.layout, deploy.upload.config), key])
            if not missing:
                return manifest
            if key in missing:
                manifest = None
        raise StoreUnavailable("garbage collections remove the files of this deploy again and again")

    def _put_manifest(self, tenant: str, record: FunctionRecord, deploy: Storing) -> Manifest:
        """Takes the next free version number by writing its manifest, and returns the manifest. Numbers of orphans are
        skipped."""
        layout = deploy.layout
        for number in range(record.next_version, record.next_version + MAX_ORPHANS):
            manifest = Manifest(
                function=record.name,
                version=number,
                digest=layout.digest,
                base=self._base.fingerprint,
                base_id=self._base.id,
                config_sha256=hashlib.sha256(deploy.upload.config).hexdigest(),
                weights_sha256=layout.weights_sha256,
                dtype=layout.dtype,
                ranks=layout.ranks,
                targets=layout.targets,
                bytes=layout.bytes,
                warnings=(*layout.warnings, *deploy.upload.version_defaults.notes),
                created=time.time(),
                source=deploy.upload.source,
            )
            try:
                self._store.put_if_absent(manifest_key(tenant, record.name, number), msgspec.json.encode(manifest))
            except Conflict:
                continue
            return manifest
        raise StoreUnavailable(f"function {record.name} has too many unfinished versions; remove them first")


def manifest_key(tenant: str, name: str, version: int) -> str:
    """Returns the object key of a version's manifest."""
    return f"tenants/{tenant}/functions/{name}/versions/{version}.json"


def find_digest(record: FunctionRecord, digest: str) -> VersionEntry | None:
    """Returns the record's version with this digest; None if it lists none."""
    return next((entry for entry in record.versions if entry.digest == digest), None)
