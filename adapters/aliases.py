"""Aliases: where each points, where it pointed before, and which version a call gets when calls are split."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import msgspec

from adapters.errors import Conflict, InvalidRequest

MAX_SHARES = 10
"""Versions that one alias may split its calls between."""
MAX_HISTORY = 1000
"""Earlier targets that an alias remembers, if the function has few aliases."""
MIN_HISTORY = 10
"""Earlier targets that an alias remembers at least, however many aliases its function has."""
TOLERANCE = 1e-6
"""Error that the sum of the shares may have: decimal fractions are not exact."""


class AliasChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """A target that an alias had."""

    weights: dict[str, float]
    when: float
    back: int | None = None
    """Same as `Alias.back`."""


class Alias(msgspec.Struct, frozen=True, omit_defaults=True):
    """Maps version numbers to shares of the calls; the shares sum to 1.

    Each change is one generation: the last entry of `history` has the generation before the present one, and so on. A
    rollback is a change like any other, so the history only ever grows (and forgets its oldest).
    """

    weights: dict[str, float]
    generation: int
    """Rises by one with each change."""
    when: float
    history: tuple[AliasChange, ...] = ()
    """Earlier targets, the latest last."""
    back: int | None = None
    """The generation whose target a rollback returns to; None: the one before this one."""


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the shares that are above 0. Raises InvalidRequest unless they are MAX_SHARES at most and sum to 1."""
    shares = {version: share for version, share in weights.items() if share != 0}
    if not all(0 < share <= 1 for share in shares.values()):
        raise InvalidRequest("weights", "each share of the calls is a number from 0 to 1")
    if len(shares) > MAX_SHARES:
        raise InvalidRequest("weights", f"an alias splits its calls between at most {MAX_SHARES} versions")
    total = sum(shares.values())
    if abs(total - 1) > TOLERANCE:
        raise InvalidRequest("weights", f"the shares must sum to 1, not {total:g}")
    return shares


def moved(alias: Alias | None, weights: dict[str, float], now: float, keep: int = MAX_HISTORY) -> Alias:
    """Returns the alias pointing to `weights`, with at most `keep` earlier targets; the same object if it points there
    already. With `alias` None it is a new alias."""
    if alias is None:
        return Alias(weights=weights, generation=1, when=now)
    if alias.weights == weights:
        return alias
    return Alias(weights, alias.generation + 1, now, _remembered(alias, keep))


def rolled_back(alias: Alias, listed: Collection[str], now: float, keep: int = MAX_HISTORY) -> Alias:
    """Returns the alias back at what it pointed to before, leaving out what came and went by earlier rollbacks.

    Earlier targets that name a version that is not `listed` any more are passed over. Raises Conflict when there is
    none left.
    """
    for generation, change in _earlier(alias):
        if change.weights != alias.weights and all(version in listed for version in change.weights):
            back = generation - 1 if change.back is None else change.back
            return Alias(change.weights, alias.generation + 1, now, _remembered(alias, keep), back)
    raise Conflict("the alias remembers no earlier target that it could return to")


def history_room(aliases: int) -> int:
    """Returns how many earlier targets each of `aliases` aliases of a function may remember: they are read with every
    function.json."""
    return max(MIN_HISTORY, min(MAX_HISTORY, 10 * MAX_HISTORY // max(1, aliases)))


def point_of(*parts: str) -> float:
    """Returns a number in [0, 1) for the text that `parts` make: evenly spread, and always the same for the same parts.
    Only the last part may hold line breaks."""
    digest = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def _remembered(alias: Alias, keep: int) -> tuple[AliasChange, ...]:
    return (*alias.history, AliasChange(alias.weights, alias.when, alias.back))[-keep:]


def _earlier(alias: Alias) -> Iterator[tuple[int, AliasChange]]:
    """Yields the earlier targets in the order in which rollbacks return to them, each with its generation."""
    oldest = alias.generation - len(alias.history)
    generation = alias.generation - 1 if alias.back is None else alias.back
    while generation >= oldest:
        change = alias.history[generation - oldest]
        yield generation, change
        generation = generation - 1 if change.back is None else change.back
