"""Makes and stores the manifests of base models that only vLLM serves."""

from __future__ import annotations

import logging
from pathlib import Path

from adapters import base_manifest
from adapters.base_manifest import BaseManifest, base_from_manifest
from adapters.base_model import OtherFamily, UnsupportedBase, fingerprint, load_base_model
from adapters.errors import AdapterError, CorruptRecord
from adapters.open_store import open_checked_store
from adapters.store import ObjectStore
from garnish.config import ServiceFile
from garnish.errors import StartError
from garnish.settings import Base, registry_of, vllm_config
from node_agent import base_manifests
from node_agent.base_manifests import NotMade

log = logging.getLogger(__name__)


def make_manifest(base: Base, python: str = "") -> BaseManifest:
    """Returns the manifest of a base model, made by a process of `python` (empty: this one's interpreter). Raises
    StartError."""
    try:
        return base_manifests.make_manifest(base.directory, base.id, python)
    except NotMade as error:
        raise StartError(str(error)) from error
    except UnsupportedBase as error:
        raise StartError(f"base_model: {error}") from None


def ensure_manifest(service: ServiceFile, base: Base, state: Path) -> None:
    """Makes and stores the manifest of the service's base model, if only vLLM serves it and none is stored. Raises
    StartError."""
    try:
        load_base_model(base.directory, base.id)
        return
    except OtherFamily as error:
        if service.node.engine != "vllm":
            raise StartError(f"base_model: {error}") from None
    except UnsupportedBase as error:
        raise StartError(f"base_model: {error}") from None
    try:
        store = open_checked_store(registry_of(service, state))
        manifest = _stored(store, fingerprint(base.directory))
        if manifest is None:
            manifest = make_manifest(base, vllm_config(service).python)
            base_manifest.store_manifest(store, manifest)
        base_from_manifest(manifest, base.id)
    except (AdapterError, UnsupportedBase) as error:
        raise StartError(f"base_model: {error}") from None


def try_manifest(service: ServiceFile, base: Base, state: Path) -> None:
    """Does what `ensure_manifest` does, but only logs why this host can't make the manifest: a node can, and sends it.
    Raises StartError."""
    try:
        ensure_manifest(service, base, state)
    except StartError as error:
        if not isinstance(error.__cause__, NotMade):
            raise
        log.warning(f"{error}; a node will send the manifest")


def _stored(store: ObjectStore, base_fingerprint: str) -> BaseManifest | None:
    """Returns the stored manifest; None if there is none, or if it is damaged and must be made again."""
    try:
        return base_manifest.find_manifest(store, base_fingerprint)
    except CorruptRecord:
        return None
