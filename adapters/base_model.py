"""The base model as adapters need it: its identity and the shape of every projection. No weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from adapters.base_files import UnsupportedBase as UnsupportedBase
from adapters.base_files import fingerprint as fingerprint
from adapters.base_files import pointer_problem
from adapters.model_families import FAMILIES, ROPE_TYPES, ModelFamily
from adapters.modules import PROJECTIONS as PROJECTIONS
from adapters.modules import Module, Modules, family_modules

NUMBERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
"""Fields of config.json that each family needs."""
MODALITIES = {"vision_config": "images", "audio_config": "sound"}
"""Fields of config.json that only models of more than text have."""


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
        pointer = config_file.is_file() and pointer_problem(config_file)
        raise UnsupportedBase(f"{config_file}: {pointer or f'not a readable config.json ({error})'}") from error
    if model_type not in FAMILIES:
        raise OtherFamily(
            f"{config_file}: Garnish's own engine does not serve model_type {model_type!r} ({_kind(config)}); it "
            f"serves {', '.join(FAMILIES)}. vLLM may serve it: set node.engine: vllm in the service file"
        )
    missing = [name for name in NUMBERS if not isinstance(config.get(name), int)]
    if missing:
        raise UnsupportedBase(f"{config_file}: {', '.join(missing)} must be numbers, as in a {model_type} of the Hub")
    return config


def check_own_engine(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedBase if our own engine can't compute this base model of one of its families."""
    instead = "vLLM may serve it: set node.engine: vllm in the service file"
    config_file = directory / "config.json"
    quantised = config.get("quantization_config") or config.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UnsupportedBase(
            f"{config_file}: the weights are quantised ({method or 'bitsandbytes'}), and Garnish's own engine reads "
            f"float32, float16 and bfloat16; name a directory with the original weights. {instead}"
        )
    ropes = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
    types = [rope.get("rope_type") or rope.get("type") or "default" for rope in ropes if isinstance(rope, dict)]
    rope_type = next((each for each in types if each not in ROPE_TYPES), None)
    if rope_type is not None:
        raise UnsupportedBase(
            f"{config_file}: rope_type {rope_type!r} is not served by Garnish's own engine; it serves "
            f"{', '.join(ROPE_TYPES)}. {instead}"
        )


def _kind(config: Mapping[str, Any]) -> str:
    """Returns a text about what the model is."""
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "of no named architecture"
    modes = [text for key, text in MODALITIES.items() if key in config]
    return f"{name[:100]}, which also reads {' and '.join(modes)}" if modes else name[:100]


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
