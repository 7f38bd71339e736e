"""Resolution of a name: the versions between which its calls are split, and the version that one call runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from adapters.errors import ArtifactPending, CorruptArtifact, InvalidAdapter, Problem
from adapters.functions import Policy


class Resolved(msgspec.Struct, frozen=True):
    """Version of a function, ready to be sent to a node."""

    function: str
    version: int
    digest: str
    artifact_key: str
    ranks: tuple[int, ...]
    bytes: int
    policy: Policy
    itemsize: int = 0
    """Bytes of an element, as in VersionEntry."""


class Choice(msgspec.Struct, frozen=True):
    """A version that a call may get, with its share of the calls."""

    share: float
    version: Resolved
    refused: tuple[Problem, ...] = ()
    """Reasons why it does not fit the present base model."""
    damaged: str = ""
    """Problem of its stored files, if they are needed."""
    pending: bool = False
    """The artifact for the present base is still to be made, or tried again: `Registry.make_artifact`."""

    @property
    def is_whole(self) -> bool:
        """Returns whether a node can load it now."""
        return not (self.refused or self.damaged or self.pending)


def pick(choices: Sequence[Choice], point: float) -> Resolved:
    """Returns the version into whose share `point` falls, where shares lie side by side from 0.

    Raises InvalidAdapter, CorruptArtifact or ArtifactPending when a node can't load that version now.

    Moving share from one of two versions to the other moves only the points in between.
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
