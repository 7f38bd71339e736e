"""Messages of the routes that move aliases."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from adapters.aliases import MAX_SHARES

VersionNumber = Annotated[int, Meta(ge=1, le=999_999_999)]
VersionText = Annotated[str, Meta(pattern="^[1-9][0-9]{0,8}$")]


class AliasTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of `version` and `weights`. Weights are version -> share of the calls; they sum to 1."""

    version: VersionNumber | None = None
    weights: (
        Annotated[dict[VersionText, Annotated[float, Meta(ge=0, le=1)]], Meta(min_length=1, max_length=MAX_SHARES)]
        | None
    ) = None


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which alias to point to what it pointed to before."""

    alias: str = "latest"


class AliasPast(msgspec.Struct, frozen=True):
    """A target that the alias had."""

    version: int | None
    weights: dict[str, float]
    since: float
    """Unix time."""


class AliasReply(msgspec.Struct, frozen=True):
    """Where an alias points. `version` is null while it splits its calls."""

    function: str
    alias: str
    version: int | None
    weights: dict[str, float]
    since: float
    """Unix time."""
    changes: int
    """How often it was moved, its first target included."""
    generation: int
    """Of the function, as in the ETag."""
    history: list[AliasPast]
    """Earlier targets, the latest first."""
