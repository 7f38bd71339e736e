"""Manifests of base models that nodes send: checked against this gateway's base model, then stored."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from adapters.base_manifest import (
    BaseManifest,
    base_from_manifest,
    check_manifest,
    find_manifest,
    store_manifest,
)
from adapters.base_model import UnsupportedBase, fingerprint
from adapters.errors import CorruptRecord
from adapters.store import ObjectStore
from cluster.errors import ServiceError
from gateway.config import GatewayConfig
from gateway.http.errors import invalid

MANIFEST_LIMIT = 16 << 20
"""Maximum bytes of a manifest. A model of 100 layers has some 200 kB; one with a module for each expert has some MB."""


def take_manifest(store: ObjectStore, config: GatewayConfig, body: bytes) -> None:
    """Stores a manifest that a node sent, unless the registry has one of this base. Blocks.

    Raises ServiceError (`validation_failed`) if it is malformed, of another version, or of another base model than this
    gateway's. Raises StoreUnavailable.
    """
    try:
        manifest = msgspec.json.decode(body, type=BaseManifest)
        check_manifest(manifest)
        _check_own(manifest, Path(config.model_dir))
        manifest = msgspec.structs.replace(manifest, id=config.base_id)
        base_from_manifest(manifest, config.base_id)
    except (msgspec.DecodeError, UnsupportedBase) as error:
        raise invalid("manifest", f"not a manifest of this gateway's base model {config.base_id}: {error}") from None
    try:
        if find_manifest(store, manifest.fingerprint) is not None:
            return
    except CorruptRecord:
        pass  # it is replaced
    store_manifest(store, manifest)


def _check_own(manifest: BaseManifest, directory: Path) -> None:
    """Raises UnsupportedBase if the manifest is of another base model than the one in this gateway's directory."""
    local = fingerprint(directory)
    if manifest.fingerprint != local:
        raise UnsupportedBase(
            f"its fingerprint {manifest.fingerprint[:12]} differs from {local[:12]}: config.json and the weight files "
            "must be the same on nodes and gateways"
        )
    for name, sha256 in manifest.tokenizer.items():
        file = directory / name
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise UnsupportedBase(f"the node's {name} differs from this gateway's")


def unavailable(reason: str) -> ServiceError:
    """Returns the error of all calls while the gateway waits for a manifest."""
    return ServiceError("unavailable", reason, retry_after=1.0)
