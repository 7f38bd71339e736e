"""Tensor names of adapters that were saved from inside a wrapper, such as `_orig_mod.` of torch.compile.

A wrapper's part is left out of the names if all tensors have the same one at the same place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

LANGUAGE = "language_model"
"""Part of the names of a multimodal model's language model, whose layers are those of a text model."""
WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", LANGUAGE))
"""Parts of names that torch.compile, FSDP, activation checkpointing, DistributedDataParallel and multimodal models
add."""
ROOT = ("base_model", "model")
"""First parts of the names that PEFT saves."""

Part = tuple[int, str]
"""Place of a part among the parts of a name, and the part."""


class Wrapper(msgspec.Struct, frozen=True):
    """A wrapper's parts in the names of all tensors."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return " and ".join(f"`{part}.`" for _, part in self.parts)

    @property
    def is_language_model(self) -> bool:
        """Returns whether the names are those of a multimodal model."""
        return any(part == LANGUAGE for _, part in self.parts)

    @property
    def is_inside(self) -> bool:
        """Returns whether modules' names had the parts in training, not only the tensors' names when they were
        saved."""
        return self.parts[-1][0] >= len(ROOT)

    def added_to(self, module: str) -> str:
        """Returns the name that a module of the base's layers had in training."""
        names = [*ROOT, *module.split(".")]
        if len(names) <= self.parts[-1][0]:
            return module
        for place, part in self.parts:
            names.insert(place, part)
        root = [part for place, part in self.parts if place < len(ROOT)]
        return ".".join(names[len(ROOT) + len(root) :])


def split_wrapper(name: str) -> tuple[tuple[Part, ...], str]:
    """Returns the wrapper's parts in a tensor's name, and the name without them. An adapter's name, which comes after
    `lora_A`, is never one."""
    names = name.split(".")
    end = next((place for place, part in enumerate(names) if part.startswith("lora_")), len(names))
    parts = tuple((place, part) for place, part in enumerate(names[:end]) if part in WRAPPERS)
    return parts, ".".join(part for place, part in enumerate(names) if place >= end or part not in WRAPPERS)


def find_wrapper(names: Iterable[str], modules: Collection[str]) -> tuple[Wrapper, Mapping[str, str]] | None:
    """Returns the wrapper that all tensors' names have, and the names without it.

    Returns None if there is none, or if they have different ones. `modules`: names of the base's modules, whose own
    parts are no wrapper's.
    """
    split = {name: split_wrapper(name) for name in names}
    variants = {parts for parts, _ in split.values()}
    plain = {name: rest for name, (_, rest) in split.items()}
    of_base = {part for module in modules for part in module.split(".")} & WRAPPERS
    if len(variants) != 1 or len(set(plain.values())) < len(plain):
        return None
    (parts,) = variants
    if not parts or any(part in of_base for _, part in parts):
        return None
    return Wrapper(parts), plain


def mixed_wrappers(names: Collection[str], modules: Collection[str]) -> str:
    """Returns a text about wrappers that only some of the names have; empty if there are none."""
    of_base = {part for module in modules for part in module.split(".")} & WRAPPERS
    split = {name: tuple(part for part in split_wrapper(name)[0] if part[1] not in of_base) for name in names}
    variants = {parts for parts in split.values() if parts}
    if not variants or len(set(split.values())) == 1:
        return ""
    wrapped = [name for name, parts in split.items() if parts]
    without = [name for name, parts in split.items() if not parts]
    shown = " or ".join(sorted({f"`{part}.`" for parts in variants for _, part in parts}))
    if not without:
        return f"the names of its {len(names)} tensors have {shown} at different places, such as {wrapped[0][:200]}"
    return (
        f"{len(wrapped)} of its {len(names)} tensors have {shown} in their names, and {len(without)} have not, such as "
        f"{without[0][:200]}"
    )
