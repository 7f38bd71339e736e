"""The modules of a base model, by their names in transformers: which of them adapters can change, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import msgspec

from adapters.model_families import LLAMA, ModelFamily

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of the projections. Every table with a dimension of 7 is in this order."""

LINEAR, EMBEDDING, EXPERTS = "linear", "embedding", "experts"
"""Kinds of modules. A module of another class has kind ""."""
MAX_PATHS = 12
"""Maximum number of paths in a summary of the modules that can be adapted."""

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


class Module(msgspec.Struct, frozen=True, omit_defaults=True):
    """A module of a base model."""

    name: str
    """Path in transformers, such as `model.layers.0.self_attn.q_proj`."""
    kind: str = ""
    """LINEAR, EMBEDDING, EXPERTS (weights of several experts in one parameter) or "" (any other class)."""
    parameters: dict[str, tuple[int, ...]] = {}
    """Shapes of the module's parameters by their names, without those of modules inside it."""

    @property
    def widths(self) -> tuple[int, int]:
        """Pair (d_in, d_out) of a linear module."""
        d_out, d_in = self.parameters["weight"]
        return d_in, d_out

    @property
    def target(self) -> str:
        """Short name of the projection, such as `q` or `qkv`."""
        return self.name.rpartition(".")[2].removesuffix("_proj")


class Modules:
    """All modules of a base model, in the order of transformers."""

    def __init__(self, modules: Iterable[Module], output: str, decoder: str) -> None:
        """`output`: name of the linear module that computes the logits. `decoder`: name of the language model's stack
        of layers."""
        self._by_name = {module.name: module for module in modules}
        self._output, self._decoder = output, decoder

    @property
    def names(self) -> Sequence[str]:
        """Names of all modules; targets may match any of them."""
        return list(self._by_name)

    def renamed(self, rename: Callable[[str], str]) -> Modules:
        """Returns the same modules under other names."""
        modules = [msgspec.structs.replace(module, name=rename(name)) for name, module in self._by_name.items()]
        return Modules(modules, rename(self._output), rename(self._decoder))

    @property
    def all_linear(self) -> Sequence[str]:
        """Names of the modules that PEFT's `all-linear` selects."""
        return [m.name for m in self._by_name.values() if m.kind == LINEAR and m.name != self._output]

    @cached_property
    def adaptable(self) -> dict[str, Module]:
        """Modules that adapters can change, by name."""
        return {name: module for name, module in self._by_name.items() if not self.refusal(name)}

    def refusal(self, name: str) -> str:
        """Returns the reason why adapters can't change this module; "" if they can, or if there is no such module."""
        module = self._by_name.get(name)
        if module is None:
            return ""
        if module.kind == EXPERTS or self._is_expert(name):
            return "it belongs to a mixture of experts (MoE), whose adapters are not served yet"
        if name == self._output:
            return "it computes the logits"
        if module.kind == EMBEDDING:
            return "it is an embedding"
        if module.kind != LINEAR:
            return "it is no linear module"
        if not name.startswith(f"{self._decoder}."):
            return "it lies outside the language model's layers"
        return ""

    @cached_property
    def paths(self) -> str:
        """Text with the paths of the modules that can be adapted, N in the place of numbers."""
        paths = list(dict.fromkeys(_NUMBER.sub("N", name) for name in self.adaptable))
        more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
        return ", ".join(paths[:MAX_PATHS]) + more

    @cached_property
    def targets(self) -> Sequence[str]:
        """Short names of the projections that can be adapted, in the order of the modules."""
        return list(dict.fromkeys(module.target for module in self.adaptable.values()))

    @cached_property
    def _mixtures(self) -> frozenset[str]:
        """Names of the modules that have experts inside, such as `model.layers.0.mlp`."""
        return frozenset(
            name.rpartition(".")[0]
            for name, module in self._by_name.items()
            if module.kind == EXPERTS or name.rpartition(".")[2] == "experts"
        )

    def _is_expert(self, name: str) -> bool:
        """Returns whether the module is an expert, the router, or a shared expert of a mixture."""
        parts = name.split(".")
        return any(".".join(parts[:end]) in self._mixtures for end in range(1, len(parts)))


def place_of(module: str) -> tuple[int, int] | None:
    """Returns (layer, index in PROJECTIONS) of one of the seven projections; None for any other module."""
    match = _LAYER.fullmatch(module)
    if match is None or match[2] not in LLAMA.projections:
        return None
    return int(match[1]), LLAMA.projections.index(match[2])


def label(module: str) -> str:
    """Returns the name of a module in digests: `0.q` for one of the seven projections, else the module's name."""
    place = place_of(module)
    return module if place is None else f"{place[0]}.{PROJECTIONS[place[1]]}"


def family_modules(
    family: ModelFamily, num_layers: int, hidden: int, vocab: int, widths: Sequence[tuple[int, int]]
) -> Modules:
    """Returns the modules of a base of one of our families. `widths`: pairs (d_in, d_out) in the order of
    PROJECTIONS."""
    head = Module("lm_head", LINEAR, {"weight": (vocab, hidden)})
    modules = [Module("model"), Module("model.embed_tokens", EMBEDDING, {"weight": (vocab, hidden)})]
    modules += [Module("model.layers"), Module("model.norm"), Module("model.rotary_emb"), head]
    inner_modules = (*family.layer_norms, *family.head_norms, *family.other_modules)
    for layer in range(num_layers):
        inside = f"model.layers.{layer}"
        modules.append(Module(inside))
        for path, (d_in, d_out) in zip(family.projections, widths, strict=True):
            modules.append(Module(f"{inside}.{path}", LINEAR, {"weight": (d_out, d_in)}))
        modules += [Module(f"{inside}.{path}") for path in inner_modules]
    return Modules(modules, head.name, "model")
