"""Sizes of a base model in numbers of elements, from its config.json or its manifest. No weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from adapters.base_model import PROJECTIONS, BaseModel, ForeignModules, head_dim, kv_elements, projection_widths
from adapters.model_families import FAMILIES, LLAMA
from adapters.modules import LINEAR

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
OPTIONAL = ("num_key_value_heads", "head_dim")
ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "fc2", "wo", "w2")
"""Last names of linear modules whose inputs tensor parallelism divides. It divides the outputs of all others."""
QUANTISED_BITS = {"fp8": 8, "int8": 8, "modelopt": 8, "fbgemm_fp8": 8, "experts_int8": 8, "ptpc_fp8": 8, "quark": 8}
"""Bits of a weight, by the name of a quantisation. Other quantisations count with FEWEST_BITS, unless their settings
say more."""
FEWEST_BITS = 4


class UnknownSizes(ValueError):
    """A config.json does not say how large the base model is."""


class BaseSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a base model, in elements."""

    linear: int
    """Weights of the linear modules, without the one that computes the logits. Quantisation makes these smaller."""
    rest: int
    """All other parameters: embeddings, logits, norms, biases."""
    kv: int
    """Keys and values of one token, over the layers that keep those of all tokens."""
    context: int
    """Tokens of the longest sequence."""
    inputs: tuple[int, int]
    """Sums of d_in over the modules that adapters can change: those that tensor parallelism divides by their outputs,
    and those that it divides by their inputs."""
    outputs: tuple[int, int]
    """Sums of d_out, likewise."""

    def weights(self, itemsize: int, bits: int | None = None) -> int:
        """Returns the bytes of all parameters. `bits`: of a quantised weight; None: not quantised."""
        return self.linear * (itemsize * 8 if bits is None else bits) // 8 + self.rest * itemsize

    def per_rank(self, devices: int = 1, *, divided: bool = False) -> int:
        """Returns the elements, on each of a node's `devices`, of a LoRA adapter of rank 1 for all modules.

        Of each pair of matrices one is divided among the devices, as in vLLM, or both if `divided`.
        """
        undivided, parts = self.inputs[0] + self.outputs[1], self.outputs[0] + self.inputs[1]
        return (undivided + parts) // devices if divided else undivided + parts // devices


def sizes_from_config(config: Mapping[str, Any]) -> BaseSizes:
    """Returns the sizes of a Llama-like base. A model of a family that is not known is treated as Llama. Raises
    UnknownSizes."""
    check_config(config)
    hidden, layers, widths = int(config["hidden_size"]), int(config["num_hidden_layers"]), projection_widths(config)
    family = FAMILIES.get(str(config.get("model_type")), LLAMA)
    biased = {*family.biased}.union(*(names for key, names in family.bias_keys.items() if config.get(key)))
    biases = sum(d_out for name, (_, d_out) in zip(PROJECTIONS, widths, strict=True) if name in biased)
    norms = len(family.layer_norms) * hidden + len(family.head_norms) * head_dim(config)
    embedding = int(config["vocab_size"]) * hidden
    names = [path.rpartition(".")[2] for path in family.projections]
    inputs, outputs = _sums((name, *pair) for name, pair in zip(names, widths, strict=True))
    return BaseSizes(
        linear=layers * sum(d_in * d_out for d_in, d_out in widths),
        rest=layers * (biases + norms) + hidden + embedding * (1 if config.get("tie_word_embeddings") else 2),
        kv=kv_elements(layers, widths),
        context=int(config["max_position_embeddings"]),
        inputs=(layers * inputs[0], layers * inputs[1]),
        outputs=(layers * outputs[0], layers * outputs[1]),
    )


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UnknownSizes unless the config has the numbers of a Llama-like model."""
    fields = {name: config.get(name) for name in NEEDED} | {name: config.get(name) or 1 for name in OPTIONAL}
    wrong = [name for name, value in fields.items() if not isinstance(value, int) or value <= 0]
    if wrong:
        raise UnknownSizes(
            f"base_model: what a node needs can't be determined from its config.json: expected whole numbers above 0, "
            f"as a Llama-like model has them, for {', '.join(wrong)}"
        )


def sizes_of_foreign(base: BaseModel, foreign: ForeignModules) -> BaseSizes:
    """Returns the sizes of a base that only vLLM serves.

    Adapters of such a base take room for the embeddings and the logits too, since vLLM reserves it for most models.
    """
    linear, total = 0, 0
    for module in foreign.modules:
        size = sum(map(_elements, module.parameters.values()))
        is_output = module.name == foreign.output
        total += 0 if is_output and foreign.tied else size
        linear += size if module.kind == LINEAR and not is_output else 0
    adapted = [(module.name.rpartition(".")[2], *module.widths) for module in base.modules.adaptable.values()]
    inputs, outputs = _sums(adapted)
    ends = 2 * (base.hidden_size + base.vocab_size)
    return BaseSizes(
        linear=linear,
        rest=total - linear,
        kv=foreign.kv_elements,
        context=base.max_context,
        inputs=(inputs[0] + ends, inputs[1]),
        outputs=outputs,
    )


def quantised_bits(config: Mapping[str, Any], quantization: str | None) -> int | None:
    """Returns the bits of a quantised weight; None if the weights are not quantised. `quantization`: the argument of
    vLLM of this name. A quantisation that is not known counts with the fewest bits."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None if quantization is None else QUANTISED_BITS.get(quantization, FEWEST_BITS)
    stated = settings.get("bits") or settings.get("w_bit")
    if settings.get("load_in_8bit"):
        stated = 8
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping):
        stated = max((_group_bits(group) for group in groups.values()), default=0) or stated
    method = str(settings.get("quant_method") or quantization or "")
    return int(stated) if isinstance(stated, int) and stated > 0 else QUANTISED_BITS.get(method, FEWEST_BITS)


def dtype_of(config: Mapping[str, Any]) -> str:
    """Returns the dtype that a config.json names; float32 if it names none."""
    inner = config.get("text_config")
    names = [config.get("dtype"), config.get("torch_dtype")]
    if isinstance(inner, Mapping):
        names += [inner.get("dtype"), inner.get("torch_dtype")]
    return next((str(name) for name in names if name), "float32")


def _group_bits(group: object) -> int:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
    return bits if isinstance(bits, int) else 0


def _sums(modules: Iterable[tuple[str, int, int]]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the sums of d_in and of d_out of modules (name, d_in, d_out), as in BaseSizes."""
    inputs, outputs = [0, 0], [0, 0]
    for name, d_in, d_out in modules:
        by_row = name in ROW_PARALLEL
        inputs[by_row] += d_in
        outputs[by_row] += d_out
    return (inputs[0], inputs[1]), (outputs[0], outputs[1])


def _elements(shape: Iterable[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
