"""What a deploy is given of an adapter, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adapters.functions import Manifest

if TYPE_CHECKING:  # it loads numpy, which the command line need not wait for
    from adapters.validate import LoraLayout


@dataclass(frozen=True)
class AdapterUpload:
    """An adapter's two files, and what its deploy states beside them. `weights` must not change during the deploy."""

    config: bytes
    """Content of adapter_config.json."""
    weights: Path
    """File in the format of adapter_model.safetensors."""
    alias: str | None = None
    """None: `latest`."""
    policy: dict[str, Any] | None = None
    """Fields of the function's policy to change."""
    source: str | None = None
    """Where the files came from, if not with the request."""


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
