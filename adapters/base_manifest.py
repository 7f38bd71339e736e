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

LINEAR_DIMENSIONS = 2
MANIFEST_VERSION = 2
"""Version of the manifest's form. Raise it when a field changes its meaning."""


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
MAX_MODULES = 500_000
MAX_SIZE = 1 << 40
"""Maximum of each number in a manifest."""
MAX_NAME = 500
"""Maximum characters of a name in a manifest."""


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


class NoManifest(UnsupportedBase):
    """The registry has no manifest of a base model that only vLLM serves."""


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
        raise NoManifest(
            f"{directory}: the registry has no manifest of this base model, which only vLLM serves; run "
            "`garnish base inspect --store` with the service file on a host that has the model and transformers"
        )
    return base_from_manifest(manifest, model_id)


def check_manifest(manifest: BaseManifest) -> None:
    """Raises UnsupportedBase if the manifest, which another host sent, is of another version or contradicts itself."""
    if manifest.version != MANIFEST_VERSION:
        raise UnsupportedBase(f"it has version {manifest.version}, and {MANIFEST_VERSION} is read here")
    base = manifest.base
    numbers = {
        name: getattr(base, name) for name in ("num_layers", "hidden_size", "vocab_size", "max_context", "kv_elements")
    }
    wrong = [name for name, number in numbers.items() if not 0 < number <= MAX_SIZE]
    if wrong:
        raise UnsupportedBase(f"{wrong[0]} is {numbers[wrong[0]]}: expected a number above 0, at most 2^40")
    if len(base.modules) > MAX_MODULES or len({module.name for module in base.modules}) < len(base.modules):
        raise UnsupportedBase(f"expected at most {MAX_MODULES} modules, each with its own name")
    names = [base.architecture, base.model_type, *manifest.tokenizer, *(module.name for module in base.modules)]
    if not all(0 < len(name) <= MAX_NAME for name in names):
        raise UnsupportedBase(f"expected names of 1 to {MAX_NAME} characters")
    if not set(manifest.tokenizer) <= set(TOKENIZER_FILES):
        raise UnsupportedBase("it names a file that is none of a tokenizer's")
    for module in base.modules:
        shapes = module.parameters.values()
        if not all(0 < extent <= MAX_SIZE for shape in shapes for extent in shape):
            raise UnsupportedBase(f"{module.name}: a parameter has no shape")
        if module.kind == LINEAR and len(module.parameters.get("weight", ())) != LINEAR_DIMENSIONS:
            raise UnsupportedBase(f"{module.name}: a linear module needs a weight of two dimensions")


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
