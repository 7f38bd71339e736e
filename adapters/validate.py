"""Validation of an adapter: maps every tensor to a module of the base model, or refuses with all reasons."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from adapters.base_model import BaseModel
from adapters.errors import MAX_PROBLEMS, InvalidAdapter, Problem
from adapters.modules import Module, Modules, label
from adapters.peft_config import LoraSettings, check_config, field_problem, scale
from adapters.peft_format import PeftAdapter, TensorRef, read_peft
from adapters.peft_targets import Target, find_targets
from adapters.rank_limit import RankLimit
from adapters.tensor_names import with_plain_names
from adapters.tensor_values import SERVED_DTYPES, dtype_problem, dtype_warnings, is_finite
from adapters.wrapped_adapters import find_wrapped_targets, in_one_problem, without_wrapper, wrapper_warning

DIGEST_FORMAT = 1
"""Format number in every digest; raise it when the stored content changes its meaning, so that digests differ."""

SPARE_TENSORS = 4096
"""Maximum number of surplus tensors that are refused one by one. Surplus tensors are those beyond the most that an
adapter of the base can have. If there are more, they are one problem."""

MAX_NAMED = 20
"""Maximum number of modules that a problem names."""

MARKS = (
    ("lora_magnitude_vector", "use_dora", "a magnitude vector of DoRA, which is not served yet"),
    ("lora_embedding_", "", "LoRA on the embeddings is not served"),
    ("modules_to_save", "modules_to_save", "a whole module saved beside the adapter is not served"),
    ("trainable_tokens", "trainable_token_indices", "trained token embeddings are not served"),
    (".lora_B.bias", "lora_bias", "biases are not served"),
)
"""Marks in tensors' names, the fields of the config that bring such tensors, and the reasons for refusing them."""
OTHER_TENSORS = ("peft_type", "task_type", "layer_replication")
"""Fields of the config whose problem means that the tensors are those of another kind of adapter."""
EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "embed_in.weight", "embed_out.weight")
"""Ends of the names of whole embeddings."""
RESIZED = (
    "whole embeddings, which PEFT saves by itself once the vocabulary has been resized; the base's are served: save "
    "the adapter with save_pretrained(FOLDER, save_embedding_layers=False) if they were not trained, or else merge it "
    "into the base"
)

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight", re.ASCII)


class LoraPair(msgspec.Struct, frozen=True):
    """LoRA matrices A and B of one module."""

    module: str
    """Name of the module in transformers."""
    rank: int
    scale: float
    a: TensorRef
    """Matrix A, [rank, d_in]."""
    b: TensorRef
    """Matrix B, [d_out, rank]."""


class LoraLayout(msgspec.Struct, frozen=True):
    """A checked adapter: its adapted modules, and the positions of its tensors in the weights file."""

    digest: str
    """Identity of the version: a SHA-256 (hex), see `digest_of`."""
    weights_sha256: str
    pairs: tuple[LoraPair, ...]
    """Adapted modules, in the order of the base."""
    dtype: str
    """Dtype in which the tensors are served: float32, float16 or bfloat16; float32 if the file mixes such dtypes."""
    ranks: tuple[int, ...]
    """Distinct ranks of the modules, ascending."""
    targets: tuple[str, ...]
    """Short names of the adapted projections, such as q, k, v, o, gate, up, down, in the order of the base."""
    bytes: int
    """Size of all tensors in `dtype`, in bytes."""
    warnings: tuple[str, ...]


class Inspection(msgspec.Struct, frozen=True, tag=True):
    """Result of checking the config and the header, without the tensors' values."""

    pairs: tuple[LoraPair, ...]
    """Adapted modules as in LoraLayout.pairs; incomplete when there are problems."""
    targets: tuple[str, ...]
    tensors: tuple[TensorRef, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    omitted: int = 0
    """Number of further problems that are not listed."""
    rank: int = 0
    """Rank `r` of the config."""


FindTargets = Callable[[LoraSettings, Modules], list[Target]]


def inspect_files(config: bytes, weights: Path, base: BaseModel, find: FindTargets = find_targets) -> Inspection:
    """Returns the result of `inspect` for an adapter's two files. Raises InvalidAdapter or TooLarge."""
    return inspect(read_peft(config, weights, 2 * len(base.modules.adaptable) + SPARE_TENSORS), base, find)


def inspect(adapter: PeftAdapter, base: BaseModel, find: FindTargets = find_targets) -> Inspection:
    """Maps the adapter to the base model, and returns the result with its problems. Raises InvalidAdapter when the
    tensors' names show that it is another kind of file."""
    settings, problems, warnings = check_config(adapter.config)
    warnings = [*adapter.warnings, *warnings]
    try:
        adapter, wrapper = without_wrapper(adapter, base.modules)
        adapter = with_plain_names(adapter)
    except InvalidAdapter as error:
        raise InvalidAdapter([*error.problems, *problems]) from None
    targets, modules = list[Target](), base.modules
    if settings is not None:
        if settings.target_modules is None:
            settings = msgspec.structs.replace(settings, target_modules=base.default_targets)
        try:
            targets = find_wrapped_targets(settings, modules, wrapper, find)
        except InvalidAdapter as error:
            problems += error.problems
        else:
            problems += [] if targets else [_no_targets(adapter, base, modules)]
    pairs, mapping_problems = _map(adapter, base, modules, targets, settings is not None and settings.use_rslora)
    mapping_problems = _not_implied(mapping_problems, problems, targets, adapter)
    if wrapper is not None:
        mapping_problems = in_one_problem(mapping_problems, wrapper, len(adapter.tensors), base.id)
        warnings.append(wrapper_warning(wrapper, base.id))
    problems += mapping_problems
    if not problems:
        warnings += [*_base_warnings(adapter, base), *dtype_warnings(adapter.tensors.values())]
    shown = tuple(problems[:MAX_PROBLEMS])
    adapted = {modules.adaptable[pair.module].target for pair in pairs}
    return Inspection(
        pairs=pairs,
        targets=tuple(target for target in modules.targets if target in adapted),
        tensors=tuple(adapter.tensors.values()),
        problems=shown,
        warnings=tuple(warnings),
        omitted=len(problems) - len(shown),
        rank=settings.rank if settings is not None else 0,
    )


def check_values(inspection: Inspection, weights: Path) -> LoraLayout:
    """Reads every tensor once, and returns the layout of the checked adapter. Raises InvalidAdapter with the problems
    of the inspection and of the values."""
    problems = [*inspection.problems, *_value_problems(inspection.tensors, weights)]
    if problems:
        raise InvalidAdapter(problems, inspection.omitted)
    return _layout(weights, inspection)


def _no_targets(adapter: PeftAdapter, base: BaseModel, modules: Modules) -> Problem:
    names = dict.fromkeys(name.rpartition(".")[2] for name in modules.adaptable)
    return field_problem(
        "target_modules",
        f"it names no module of this base model ({base.id}, {base.model_type})",
        ", ".join(list(names)[:MAX_NAMED]),
        adapter.config.get("target_modules"),
    )


def within_limit(inspection: Inspection, limit: RankLimit | None) -> Inspection:
    """Returns the inspection, with a problem if a module's rank is above the limit."""
    rank = max((pair.rank for pair in inspection.pairs), default=0)
    if limit is None or rank <= limit.rank:
        return inspection
    field = "r" if rank == inspection.rank else "rank_pattern"
    memory = next((each for slot, each in sorted(limit.memory.items()) if slot >= rank), "")
    reason = "above the largest rank that this service's nodes take (node.vllm.max_lora_rank)"
    problem = field_problem(field, reason + (f"; {rank} would need {memory}" if memory else ""), str(limit.rank), rank)
    return msgspec.structs.replace(inspection, problems=(*inspection.problems, problem))


def digest_of(pairs: Sequence[LoraPair], weights_sha256: str) -> str:
    """Returns the digest: SHA-256 (hex) of canonical JSON with rank and scaling of each module, the weights' hash and
    DIGEST_FORMAT.

    Equal tensors with another alpha have another digest. Configs that differ only in harmless fields have the same.
    """
    projections = {label(pair.module): [pair.rank, pair.scale] for pair in pairs}
    text = {"format": DIGEST_FORMAT, "projections": projections, "weights": weights_sha256}
    return hashlib.sha256(json.dumps(text, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 (hex) of a file, read as a stream."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _layout(weights: Path, inspection: Inspection) -> LoraLayout:
    pairs = inspection.pairs
    refs = [ref for pair in pairs for ref in (pair.a, pair.b)]
    dtypes = {ref.dtype for ref in refs}
    served = {SERVED_DTYPES[dtype] for dtype in dtypes}
    dtype = served.pop() if len(served) == 1 else "float32"
    weights_sha256 = file_sha256(weights)
    return LoraLayout(
        digest=digest_of(pairs, weights_sha256),
        weights_sha256=weights_sha256,
        pairs=pairs,
        dtype=dtype,
        ranks=tuple(sorted({pair.rank for pair in pairs})),
        targets=inspection.targets,
        bytes=sum(ref.shape[0] * ref.shape[1] for ref in refs) * (4 if dtype == "float32" else 2),
        warnings=inspection.warnings,
    )


def _map(
    adapter: PeftAdapter, base: BaseModel, modules: Modules, targets: list[Target], use_rslora: bool
) -> tuple[tuple[LoraPair, ...], list[Problem]]:
    """Returns the pairs, and the problems. There is one for each tensor that is missing, has a wrong shape, or belongs
    to no target."""
    problems: list[Problem] = []
    pairs: list[LoraPair] = []
    used: set[str] = set()
    halves: list[tuple[Module, TensorRef | None, TensorRef | None]] = []
    for target in targets:
        module = modules.adaptable.get(target.module)
        if module is None:
            reason = f"it names {target.module}, which is not served: {modules.refusal(target.module)}"
            problems.append(field_problem("target_modules", reason))
            continue
        d_in, d_out = module.widths
        refs: list[TensorRef | None] = []
        for part, shape in (("A", (target.rank, d_in)), ("B", (d_out, target.rank))):
            name = f"base_model.model.{target.module}.lora_{part}.weight"
            ref = adapter.tensors.get(name)
            used.add(name)
            refs.append(ref)
            if ref is None:
                problems.append(Problem(name, "missing, though the config targets its module", str(list(shape))))
            elif ref.shape != shape:
                problems.append(
                    Problem(name, "wrong shape for this base and rank", str(list(shape)), str(list(ref.shape)))
                )
        a, b = refs
        halves.append((module, a, b))
        if a is not None and b is not None:
            factor = scale(target.alpha, target.rank, use_rslora)
            pairs.append(LoraPair(module=module.name, rank=target.rank, scale=factor, a=a, b=b))
    if (problem := _other_base_problem(adapter, base, halves)) is not None:
        return (), [problem]
    problems += [_unmapped(ref, base, modules) for name, ref in adapter.tensors.items() if name not in used]
    return tuple(pairs), problems


def _other_base_problem(
    adapter: PeftAdapter, base: BaseModel, pairs: Iterable[tuple[Module, TensorRef | None, TensorRef | None]]
) -> Problem | None:
    """Returns a problem if no targeted module has this base's widths. Returns None if one has, or there is too little
    information.

    `pairs` has (module, A [rank, d_in], B [d_out, rank]) of each targeted module, with None for a missing tensor.
    """
    widths = [
        (module, (a.shape[1], b.shape[0]))
        for module, a, b in pairs
        if a is not None and b is not None and len(a.shape) == len(b.shape) == 2
    ]
    if not widths or any(shape == module.widths for module, shape in widths):
        return None
    module, shape = widths[0]
    return field_problem(
        "base_model_name_or_path",
        f"trained for another base model, for no module has the widths of {base.id}; "
        "deploy it to a service with its own base_model",
        f"{module.widths[0]} to {module.widths[1]}",
        f"{adapter.config.get('base_model_name_or_path')}, {shape[0]} to {shape[1]}",
    )


def _not_implied(
    mapping: list[Problem], problems: list[Problem], targets: list[Target], adapter: PeftAdapter
) -> list[Problem]:
    """Returns the problems of the mapping that do not follow from those of the config. Without targets, which is a
    problem of the config, all follow."""
    fields = {problem.tensor.partition("#")[2] for problem in problems}
    if not targets or not fields.isdisjoint(OTHER_TENSORS):
        return []
    implied = [mark for mark, field, _ in MARKS if field in fields]
    saved = adapter.config.get("modules_to_save")
    if isinstance(saved, list) and len(saved) <= MAX_NAMED:
        implied += [f".{name}." for name in saved]
    return [problem for problem in mapping if not any(mark in problem.tensor for mark in implied)]


def _unmapped(ref: TensorRef, base: BaseModel, modules: Modules) -> Problem:
    name = ref.name[:300]
    for mark, _, reason in MARKS:
        if mark in name:
            return Problem(name, reason)
    if name.endswith(EMBEDDINGS):
        return Problem(name, RESIZED)
    if name.endswith(".bias"):
        return Problem(name, "biases are not served")
    match = _TENSOR.fullmatch(name)
    if match is None:
        return Problem(name, "maps to nothing", "base_model.model.<module>.lora_A.weight or lora_B.weight")
    if match["module"] not in modules.adaptable:
        reason = modules.refusal(match["module"])
        problem = f"maps to no projection of this base model ({base.id}){reason and f': {reason}'}"
        return Problem(name, problem, modules.paths, match["module"])
    return Problem(name, "the config does not target its module")


def _value_problems(tensors: Sequence[TensorRef], weights: Path) -> list[Problem]:
    unserved = [ref for ref in tensors if ref.dtype not in SERVED_DTYPES]
    problems = [dtype_problem(unserved)] if unserved else []
    for ref in tensors:
        if ref.dtype in SERVED_DTYPES and not is_finite(weights, ref):
            problems.append(Problem(ref.name[:300], "holds NaN or Infinity", "finite values"))
    return problems


def _base_warnings(adapter: PeftAdapter, base: BaseModel) -> list[str]:
    name = adapter.config.get("base_model_name_or_path")
    if not name or name.rstrip("/").rsplit("/", 1)[-1].casefold() == base.id.rsplit("/", 1)[-1].casefold():
        return []
    return [f"the adapter names the base model {name[:200]!r}; it fits the shapes of {base.id} and is served on that"]
