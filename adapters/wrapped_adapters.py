"""Adapters whose tensors' names carry a wrapper's part: their names and targets without it, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from adapters.errors import InvalidAdapter, Problem
from adapters.modules import Modules
from adapters.peft_config import WEIGHTS_FILE, LoraSettings, field_problem
from adapters.peft_format import PeftAdapter
from adapters.peft_targets import Target
from adapters.wrapped_names import Wrapper, find_wrapper, mixed_wrappers

ADVICE = "save it with PEFT's save_pretrained from the model without the wrapper"


def without_wrapper(adapter: PeftAdapter, modules: Modules) -> tuple[PeftAdapter, Wrapper | None]:
    """Returns the adapter with tensors' names that have no wrapper's part, and the wrapper; None if there was none.

    Raises InvalidAdapter, with one problem, if only some of the names have one.
    """
    names = list(adapter.tensors)
    if problem := mixed_wrappers(names, modules.names):
        raise InvalidAdapter([Problem(WEIGHTS_FILE, f"{problem}: {ADVICE}")])
    match = find_wrapper(names, modules.names)
    if match is None:
        return adapter, None
    wrapper, plain = match
    tensors = {plain[name]: msgspec.structs.replace(ref, name=plain[name]) for name, ref in adapter.tensors.items()}
    return msgspec.structs.replace(adapter, tensors=tensors), wrapper


def find_wrapped_targets(
    settings: LoraSettings,
    modules: Modules,
    wrapper: Wrapper | None,
    find: Callable[[LoraSettings, Modules], list[Target]],
) -> list[Target]:
    """Returns the adapted modules of the base. The config's patterns are those of training, when modules may have had
    the wrapper's part in their names.

    Raises InvalidAdapter for an invalid pattern, and if the patterns mean different things with and without that part.
    """
    plain = find(settings, modules)
    if wrapper is None or not wrapper.is_inside:
        return plain
    own_names = {wrapper.added_to(name): name for name in modules.names}
    by_trained_name = find(settings, modules.renamed(wrapper.added_to))
    wrapped = [msgspec.structs.replace(target, module=own_names[target.module]) for target in by_trained_name]
    if wrapper.is_language_model or not plain:
        return wrapped
    if wrapped and wrapped != plain:
        reason = f"its patterns choose other modules or ranks with {wrapper} in the modules' names than without it"
        raise InvalidAdapter([field_problem("target_modules", f"{reason}: {ADVICE}")])
    return plain


def in_one_problem(problems: Sequence[Problem], wrapper: Wrapper, tensors: int, base_id: str) -> list[Problem]:
    """Returns at most one problem for all those of the tensors' names and shapes."""
    if not problems:
        return []
    names = {problem.tensor for problem in problems}
    missing = sum(problem.problem.startswith("missing") for problem in problems)
    first = problems[0]
    reason = (
        f"its tensors' names have {wrapper}; without that {len(names) - missing} of the {tensors} tensors do not fit "
        f"{base_id}, and {missing} that the config targets are missing; the first: {first.tensor}: {first.problem}"
    )
    return [Problem(WEIGHTS_FILE, reason, first.expected, first.found)]


def wrapper_warning(wrapper: Wrapper, base_id: str) -> str:
    """Returns the warning about a wrapper that is left out."""
    of = "a multimodal model's adapter: " if wrapper.is_language_model else ""
    return f"{of}its tensors' names have {wrapper}, which is left out; without it all of them fit {base_id}"
