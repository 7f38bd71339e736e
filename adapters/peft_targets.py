"""Search for the base's modules that a config adapts, by PEFT's rules.

Patterns in a config are untrusted regular expressions, and a few characters can keep Python's `re` busy for years. A
service for untrusted users therefore matches in a process with a time limit (adapters.inspector_process).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from adapters.errors import InvalidAdapter
from adapters.modules import Modules
from adapters.peft_config import LoraSettings, field_problem

PLAIN = re.compile(r"[A-Za-z0-9_.]*")
"""Names, which match in linear time."""


class Target(msgspec.Struct, frozen=True):
    """An adapted module, with its rank and alpha."""

    module: str
    rank: int
    alpha: float


def has_patterns(settings: LoraSettings) -> bool:
    """Returns whether the config has regular expressions other than plain names, whose time is not limited."""
    modules, excluded = settings.target_modules, settings.exclude_modules
    texts = [*settings.rank_pattern, *settings.alpha_pattern, *settings.layers_pattern]
    texts += [text for text in (modules, excluded) if isinstance(text, str) and text.lower() != "all-linear"]
    return any(PLAIN.fullmatch(text) is None for text in texts)


def find_targets(settings: LoraSettings, base: Modules) -> list[Target]:
    """Returns the adapted modules of the base. Raises InvalidAdapter when a pattern is not a valid regular
    expression."""
    ranks = [(_compile("rank_pattern", rf"(.*\.)?({key})$"), value) for key, value in settings.rank_pattern.items()]
    alphas = [(_compile("alpha_pattern", rf"(.*\.)?({key})$"), value) for key, value in settings.alpha_pattern.items()]
    targets = []
    for name in _targeted(settings, base):
        rank = next((value for pattern, value in ranks if pattern.match(name)), settings.rank)
        alpha = next((value for pattern, value in alphas if pattern.match(name)), settings.alpha)
        targets.append(Target(module=name, rank=rank, alpha=alpha))
    return targets


def _targeted(settings: LoraSettings, base: Modules) -> list[str]:
    names = base.names
    modules = settings.target_modules or ()
    if isinstance(modules, str):
        if modules.lower() == "all-linear":
            chosen = list(base.all_linear)
        else:
            pattern = _compile("target_modules", modules)
            chosen = [name for name in names if pattern.fullmatch(name)]
    else:
        chosen = [name for name in names if _names_it(modules, name)]
        if settings.layers_to_transform is not None:
            # PEFT checks the layer only of modules named by a suffix, not of those named in full.
            inside = set(_in_layers(settings, chosen))
            chosen = [name for name in chosen if name in modules or name in inside]
    return _without_excluded(settings.exclude_modules, chosen)


def _in_layers(settings: LoraSettings, names: list[str]) -> list[str]:
    sources = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in settings.layers_pattern]
    patterns = [_compile("layers_pattern", source) for source in sources or [r".*?\.[^.]*\.(?P<idx>\d+)\."]]
    inside = []
    for name in names:
        match = next((hit for hit in (pattern.match(name) for pattern in patterns) if hit), None)
        if match and int(match["idx"]) in (settings.layers_to_transform or ()):
            inside.append(name)
    return inside


def _without_excluded(exclude: tuple[str, ...] | str | None, names: list[str]) -> list[str]:
    if not exclude:
        return names
    if isinstance(exclude, str):
        pattern = _compile("exclude_modules", exclude)
        return [name for name in names if not pattern.fullmatch(name)]
    return [name for name in names if not _names_it(exclude, name)]


def _names_it(suffixes: Sequence[str], name: str) -> bool:
    return name in suffixes or name.endswith(tuple(f".{item}" for item in suffixes))


def _compile(field: str, source: str) -> re.Pattern[str]:
    try:
        return re.compile(source)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidAdapter([field_problem(field, "not a regular expression", actual=str(error))]) from None
