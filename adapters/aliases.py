"""Aliases: their targets, the history of targets, and the split of calls between versions."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import msgspec

from adapters.errors import Conflict, InvalidRequest

MAX_SHARES = 10
"""Maximum number of versions between which one alias may split its calls."""
MAX_HISTORY = 1000
"""Maximum number of earlier targets that an alias keeps; fewer if its function has many aliases."""
MIN_HISTORY = 10
"""Number of earlier targets that an alias can always keep, however many aliases its function has."""
TOLERANCE = 1e-6
"""Allowed deviation of the shares' sum from 1, since decimal fractions are not exact."""


class AliasChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """An earlier target of an alias. It became the target at Unix time `when`."""

    weights: dict[str, float]
    when: float
    back: int | None = None
    """Value of `Alias.back` while this was the target."""


class Alias(msgspec.Struct, frozen=True, omit_defaults=True):
    """An alias: a mapping from version numbers to shares of the calls, which sum to 1.

    Each change is one generation. The last entry of `history` has the generation before the current one, and so on. A
    rollback is a change like any other, so the history only grows, and drops its oldest entries.
    """

    weights: dict[str, float]
    generation: int
    """Number that rises by one with each change."""
    when: float
    history: tuple[AliasChange, ...] = ()
    """Earlier targets, oldest first."""
    back: int | None = None
    """Generation whose target a rollback restores; None: the one before this one."""


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the shares above 0. Raises InvalidRequest unless each is from 0 to 1, there are MAX_SHARES at most, and
    they sum to 1."""
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
    """Returns the alias pointing to `weights`, with at most `keep` earlier targets. Returns the same object if it
    already points there. With `alias` None, returns a new alias."""
    if alias is None:
        return Alias(weights=weights, generation=1, when=now)
    if alias.weights == weights:
        return alias
    return Alias(weights, alias.generation + 1, now, _remembered(alias, keep))


def rolled_back(alias: Alias, listed: Collection[str], now: float, keep: int = MAX_HISTORY) -> Alias:
    """Returns the alias pointing to its previous target; targets undone by earlier rollbacks are skipped.

    Targets that name a version which is no longer `listed` are skipped too. Raises Conflict when no earlier target
    remains.
    """
    for generation, change in _earlier(alias):
        if change.weights != alias.weights and all(version in listed for version in change.weights):
            back = generation - 1 if change.back is None else change.back
            return Alias(change.weights, alias.generation + 1, now, _remembered(alias, keep), back)
    raise Conflict("the alias has no earlier target to return to")


def history_room(aliases: int) -> int:
    """Returns the maximum number of earlier targets for each of `aliases` aliases of a function. The number is bounded,
    because these targets are stored in function.json and read with it."""
    return max(MIN_HISTORY, min(MAX_HISTORY, 10 * MAX_HISTORY // max(1, aliases)))


def point_of(*parts: str) -> float:
    """Returns a hash of `parts` as a number in [0, 1), uniformly distributed. The same parts always give the same
    number. Only the last part may contain line breaks."""
    digest = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def _remembered(alias: Alias, keep: int) -> tuple[AliasChange, ...]:
    return (*alias.history, AliasChange(alias.weights, alias.when, alias.back))[-keep:]


def _earlier(alias: Alias) -> Iterator[tuple[int, AliasChange]]:
    """Yields (generation, target) of the earlier targets, in the order in which rollbacks return to them."""
    oldest = alias.generation - len(alias.history)
    generation = alias.generation - 1 if alias.back is None else alias.back
    while generation >= oldest:
        change = alias.history[generation - oldest]
        yield generation, change
        generation = generation - 1 if change.back is None else change.back
