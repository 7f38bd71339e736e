"""The base model as adapters need it: its identity and the shape of every projection. No weights are loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from adapters.model_families import FAMILIES, ModelFamily
from adapters.modules import PROJECTIONS as PROJECTIONS
from adapters.modules import Module, Modules, family_modules


class UnsupportedBase(ValueError):
    """The directory does not contain a base model that Garnish can serve."""


class OtherFamily(UnsupportedBase):
    """The base model is of no family that Garnish's own engine serves."""


class ForeignModules(msgspec.Struct, frozen=True):
    """Modules of a base model that only vLLM serves, from its manifest (adapters.base_manifest)."""

    modules: tuple[Module, ...]
    output: str
    """Name of the module that computes the logits."""
    decoder: str
    """Name of the language model's stack of layers."""
    kv_elements: int
    """Number of key and value elements of one token, over the layers that keep those of all tokens."""
    tied: bool
    """True: the embeddings also compute the logits."""


class BaseModel(msgspec.Struct, frozen=True):
    """Properties of the base model that are known without reading its weights."""

    id: str
    """Hub id, or the name of the model's directory."""
    fingerprint: str
    """SHA-256 (hex) over config.json and the weight files."""
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    widths: tuple[tuple[int, int], ...]
    """Pairs (d_in, d_out) of the projections, in the order of PROJECTIONS; empty if only vLLM serves the base."""
    foreign: ForeignModules | None = None
    """Modules of a base that only vLLM serves; None: those of its family."""

    @property
    def has_artifacts(self) -> bool:
        """Returns whether our own engine serves the base. Its adapters then have serving artifacts."""
        return self.foreign is None

    @property
    def default_targets(self) -> tuple[str, ...]:
        """Projections that PEFT adapts when a config names none; empty: the config must name some."""
        return self.family.default_targets if self.foreign is None else ()

    @property
    def modules(self) -> Modules:
        """All modules of the base model."""
        if self.foreign is not None:
            return Modules(self.foreign.modules, self.foreign.output, self.foreign.decoder)
        return family_modules(self.family, self.num_layers, self.hidden_size, self.vocab_size, self.widths)

    @property
    def family(self) -> ModelFamily:
        """Model family of the base model."""
        return FAMILIES[self.model_type]

    @property
    def kv_elements(self) -> int:
        """Number of key and value elements of one token in the KV cache, over all layers."""
        return kv_elements(self.num_layers, self.widths)


def load_base_model(directory: Path, model_id: str | None = None) -> BaseModel:
    """Returns the properties of the base model in `directory`, from its config.json and a fingerprint of its files.

    Hashing the weights is slow, so the fingerprint is cached in the directory; names, sizes and times of the files
    validate it. Raises UnsupportedBase when a file is missing, and OtherFamily when our own engine does not serve the
    architecture.
    """
    config = read_family_config(directory)
    return BaseModel(
        id=model_id or directory.resolve().name,
        fingerprint=fingerprint(directory),
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_context=config["max_position_embeddings"],
        widths=projection_widths(config),
    )


def read_family_config(directory: Path) -> dict[str, Any]:
    """Returns the config.json of a base model that our own engine serves. Raises UnsupportedBase, or OtherFamily when
    our own engine does not serve the architecture."""
    config_file = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(config_file.read_bytes())
        model_type = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedBase(f"{config_file}: not a readable config.json ({error})") from error
    if model_type not in FAMILIES:
        raise OtherFamily(
            f"{config_file}: Garnish's own engine does not serve model_type {model_type!r}; it serves "
            f"{', '.join(FAMILIES)}. vLLM may serve it: set node.engine: vllm in the service file"
        )
    return config


def projection_widths(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Returns (d_in, d_out) of q, k, v, o, gate, up, down from a Llama-like config.json."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, width = config["num_attention_heads"], head_dim(config)
    q, kv = heads * width, (config.get("num_key_value_heads") or heads) * width
    return ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inner), (hidden, inner), (inner, hidden))


def head_dim(config: Mapping[str, Any]) -> int:
    """Returns the width of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_elements(num_layers: int, widths: tuple[tuple[int, int], ...]) -> int:
    """Returns the number of key and value elements of one token in the KV cache, over all layers."""
    return num_layers * (widths[1][1] + widths[2][1])


def fingerprint(directory: Path) -> str:
    """Returns the SHA-256 (hex) over config.json and all weight files. It is cached in `.garnish-fingerprint.json` in
    the directory. Raises UnsupportedBase if there are no weight files."""
    files = sorted([directory / "config.json", *directory.glob("*.safetensors")])
    if len(files) < 2:
        raise UnsupportedBase(f"{directory}: no *.safetensors weight files")
    stamp = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    memo = directory / ".garnish-fingerprint.json"
    try:
        cached = json.loads(memo.read_bytes())
        if cached["stamp"] == stamp:
            return str(cached["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no cached fingerprint, or a damaged one: hash again
    sha256 = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            sha256.update(f"{file.name}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
    value = sha256.hexdigest()
    with contextlib.suppress(OSError):  # in a read-only directory each start hashes again
        memo.write_text(json.dumps({"stamp": stamp, "fingerprint": value}))
    return value
