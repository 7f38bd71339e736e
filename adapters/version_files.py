"""Stores what versions are made of, before a function lists them."""

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
"""Times that a deploy stores again what a garbage collection was removing."""
MAX_ORPHANS = 1000
"""Numbers in a row that a deploy skips because deploys that failed, or still run, took them."""


@dataclass
class Storing:
    """A deploy under way; `manifest` is set once it has taken a version number, which it keeps through all tries."""

    upload: AdapterUpload
    layout: LoraLayout
    room: QuotaReservation
    manifest: Manifest | None = None
    is_stored: bool = False
    created: bool = False


class VersionFiles:
    """Stores the files of all functions' versions for one base model. Methods block."""

    def __init__(self, store: ObjectStore, base: BaseModel, contents: Contents) -> None:
        self._store, self._base, self._contents = store, base, contents

    def listed(self, tenant: str, record: FunctionRecord, deploy: Storing) -> VersionEntry:
        """Returns the version that the record should list: the one it has of this digest, or one with a number of its
        own, whose content is stored first."""
        existing = find_digest(record, deploy.layout.digest)
        deploy.created = existing is None
        if existing is not None:
            if self._contents.artifact_problem(existing.digest):
                self._contents.put_artifact(deploy.layout, deploy.upload.weights)
            itemsize = ITEM_BYTES[deploy.layout.dtype]
            return msgspec.structs.replace(existing, base=self._base.fingerprint, itemsize=itemsize)
        deploy.room.take(deploy.layout.bytes)
        if deploy.manifest is None or not deploy.is_stored:
            deploy.manifest, deploy.is_stored = self._put_all(tenant, record, deploy), True
        manifest = deploy.manifest
        return VersionEntry(
            version=manifest.version,
            digest=manifest.digest,
            base=manifest.base,
            ranks=manifest.ranks,
            targets=manifest.targets,
            bytes=manifest.bytes,
            created=manifest.created,
            itemsize=ITEM_BYTES[manifest.dtype],
        )

    def _put_all(self, tenant: str, record: FunctionRecord, deploy: Storing) -> Manifest:
        """Stores what the version is made of, until nothing of it is missing that a garbage collection was just
        removing. Returns the manifest. Raises StoreUnavailable after MAX_REWRITES tries."""
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
        raise StoreUnavailable("what a deploy stores is removed again and again by garbage collections")

    def _put_manifest(self, tenant: str, record: FunctionRecord, deploy: Storing) -> Manifest:
        """Takes the next free version number by writing its manifest; numbers of orphans are skipped."""
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
                warnings=layout.warnings,
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
    return f"tenants/{tenant}/functions/{name}/versions/{version}.json"


def find_digest(record: FunctionRecord, digest: str) -> VersionEntry | None:
    return next((entry for entry in record.versions if entry.digest == digest), None)
