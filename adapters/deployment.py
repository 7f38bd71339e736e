"""What a deploy says of an adapter."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from adapters.functions import Manifest
from adapters.validate import LoraLayout


class Deployment(msgspec.Struct, frozen=True):
    """What a deploy did, or (version None) what a dry run would do."""

    function: str
    version: int | None
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...]
    created: bool
    """Whether a new version was made; False when this adapter was deployed under this name before, and in a dry run."""
    dtype: str
    """Of the tensors as stored: `bytes` counts them in it."""


@dataclass(frozen=True)
class Staged:
    """An adapter whose files are stored, and that is not listed yet."""

    made: Deployment
    layout: LoraLayout
    manifest: Manifest | None
    """Of a new version, which has taken its number."""


def deployment_of(name: str, version: int | None, layout: LoraLayout, *, created: bool) -> Deployment:
    return Deployment(
        function=name,
        version=version,
        digest=layout.digest,
        ranks=layout.ranks,
        targets=layout.targets,
        bytes=layout.bytes,
        warnings=layout.warnings,
        created=created,
        dtype=layout.dtype,
    )
