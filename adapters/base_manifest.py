"""Manifest of a base model: what deploys and the gateway need to know of it, without its weights and without torch.

It is made by node_agent.base_inspection, and stored in the registry, under the base's fingerprint. Only bases of
other families than those of our own engine need one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from adapters.base_model import BaseModel, ForeignModules, OtherFamily, UnsupportedBase, fingerprint, load_base_model
from adapters.errors import Conflict, CorruptRecord
from adapters.modules import LINEAR, Module
from adapters.records import find_record
from adapters.store import ObjectStore

MANIFEST_VERSION = 2
"""Version of the manifest's form. Raise it when a field changes its meaning."""


class InspectedBase(msgspec.Struct, frozen=True):
    """Answer of the process that reads a base's config.json."""

    architecture: str
    """Class of transformers, such as `Gemma3ForCausalLM`."""
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    kv_elements: int
    """Number of key and value elements of one token, over the layers that keep those of all tokens."""
    tied: bool
    """True: the embeddings also compute the logits."""
    output: str
    """Name of the module that computes the logits."""
    decoder: str
    """Name of the language model's stack of layers."""
    modules: tuple[Module, ...]


class BaseManifest(msgspec.Struct, frozen=True):
    """Stored description of a base model."""

    version: int
    id: str
    fingerprint: str
    tokenizer: dict[str, str]
    """SHA-256 (hex) of the tokenizer's files, by name."""
    chat_template: bool
    """True: the base has a chat template."""
    base: InspectedBase


def manifest_key(base_fingerprint: str) -> str:
    """Returns the object key of a base's manifest."""
    return f"bases/v{MANIFEST_VERSION}/{base_fingerprint}.json"


def store_manifest(store: ObjectStore, manifest: BaseManifest) -> None:
    """Stores the manifest, in place of an existing one. Raises StoreUnavailable."""
    key, data = manifest_key(manifest.fingerprint), msgspec.json.encode(manifest)
    try:
        store.put_if_absent(key, data)
    except Conflict:
        store.put(key, data)


def find_manifest(store: ObjectStore, base_fingerprint: str) -> BaseManifest | None:
    """Returns the stored manifest; None if there is none. Raises StoreUnavailable, or CorruptRecord when it can't be
    read."""
    return find_record(store, manifest_key(base_fingerprint), BaseManifest)


def find_named_manifest(store: ObjectStore, base_id: str) -> BaseManifest | None:
    """Returns the latest stored manifest of a base with this id, whatever its weights; None if there is none. Raises
    StoreUnavailable."""
    prefix = f"bases/v{MANIFEST_VERSION}/"
    infos = sorted(store.list(prefix), key=lambda info: info.modified, reverse=True)
    manifests = (manifest for info in infos if (manifest := _readable(store, info.key)) is not None)
    return next((manifest for manifest in manifests if manifest.id == base_id), None)


def _readable(store: ObjectStore, key: str) -> BaseManifest | None:
    try:
        return find_record(store, key, BaseManifest)
    except CorruptRecord:
        return None


def find_base(directory: Path, model_id: str, store: ObjectStore) -> BaseModel:
    """Returns the base model in `directory`: by its config.json if its family is one of our own engine's, else by its
    manifest in the store.

    Raises UnsupportedBase, StoreUnavailable, or CorruptRecord when the manifest can't be read.
    """
    try:
        return load_base_model(directory, model_id)
    except OtherFamily:
        base_fingerprint = fingerprint(directory)
    manifest = find_manifest(store, base_fingerprint)
    if manifest is None:
        raise UnsupportedBase(
            f"{directory}: the registry has no manifest of this base model, which only vLLM serves; run "
            "`garnish base inspect --store` with the service file on a host that has the model and transformers"
        )
    return base_from_manifest(manifest, model_id)


def base_from_manifest(manifest: BaseManifest, model_id: str) -> BaseModel:
    """Returns the base model that a manifest describes. Raises UnsupportedBase when no adapter can change it."""
    base = manifest.base
    model = BaseModel(
        id=model_id,
        fingerprint=manifest.fingerprint,
        model_type=base.model_type,
        num_layers=base.num_layers,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        max_context=base.max_context,
        widths=(),
        foreign=ForeignModules(base.modules, base.output, base.decoder, base.kv_elements, base.tied),
    )
    if not model.modules.adaptable:
        linear = sum(module.kind == LINEAR for module in base.modules)
        raise UnsupportedBase(
            f"{base.architecture}: no adapter can change it: none of its {linear} linear modules is one of the "
            f"language model's, in `{base.decoder}`, outside a mixture of experts"
        )
    return model
