"""Resolution of a name: the versions between which its calls are split, and the version of one call."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from adapters.errors import ArtifactPending, CorruptArtifact, InvalidAdapter, Problem
from adapters.functions import Policy


class Resolved(msgspec.Struct, frozen=True):
    """A version of a function, with everything that a node needs to load it."""

    function: str
    version: int
    digest: str
    artifact_key: str
    """Key of the serving artifact; "" if only vLLM serves the base, from the original files."""
    ranks: tuple[int, ...]
    bytes: int
    policy: Policy
    itemsize: int
    """Bytes per element, as in VersionEntry; so are the next two fields."""
    config_sha256: str = ""
    weights_sha256: str = ""


class Choice(msgspec.Struct, frozen=True):
    """A version that a call may get, and its share of the calls."""

    share: float
    version: Resolved
    refused: tuple[Problem, ...] = ()
    """Reasons why the version does not fit the current base model; empty: it fits."""
    damaged: str = ""
    """Problem of the version's stored files, if they are needed to build the artifact; empty: none."""
    pending: bool = False
    """True: the artifact for the current base must be built, or built again (`Registry.make_artifact`)."""

    @property
    def is_whole(self) -> bool:
        """Returns whether a node can load the version now."""
        return not (self.refused or self.damaged or self.pending)


def pick(choices: Sequence[Choice], point: float) -> Resolved:
    """Returns the version into whose share `point` falls. The shares are consecutive intervals starting at 0.

    Raises InvalidAdapter, CorruptArtifact or ArtifactPending when a node can't load that version now. Moving share from
    one of two versions to the other changes the result only for points in between.
    """
    reached = 0.0
    chosen = choices[-1]  # the shares may sum to a little less than 1
    for choice in choices:
        reached += choice.share
        if point < reached:
            chosen = choice
            break
    if chosen.refused:
        raise InvalidAdapter(list(chosen.refused))
    if chosen.damaged:
        raise CorruptArtifact(chosen.damaged)
    if chosen.pending:
        raise ArtifactPending(chosen.version.function, chosen.version.version)
    return chosen.version
