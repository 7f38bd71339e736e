"""Input and result of a deploy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adapters.choices import Resolved
from adapters.functions import Manifest, OwnDefaults
from adapters.rank_limit import RankLimit

if TYPE_CHECKING:  # it loads numpy, which the command line need not wait for
    from adapters.validate import LoraLayout


@dataclass(frozen=True)
class AdapterUpload:
    """An adapter's two files, and the options of its deploy. `weights` must not change during the deploy."""

    config: bytes
    """Content of adapter_config.json."""
    weights: Path
    """Path of a file in the format of adapter_model.safetensors."""
    alias: str | None = None
    """Alias that will point to the version; None: `latest`."""
    policy: dict[str, Any] | None = None
    """Fields of the function's policy to change."""
    source: str | None = None
    """Source address of the files, if they did not come with the request."""
    rank_limit: RankLimit | None = None
    """Limit of the adapter's ranks; None: there is none."""
    version_defaults: OwnDefaults = field(default_factory=OwnDefaults)
    """Defaults of the version, from the tokenizer's files next to the adapter."""


class Deployment(msgspec.Struct, frozen=True):
    """Result of a deploy, or of a dry run (version None)."""

    function: str
    version: int | None
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...]
    created: bool
    """True: the deploy made a new version. False in a dry run, and when the function already has this adapter."""
    dtype: str
    """Dtype in which the tensors are stored; `bytes` is their size in this dtype."""


@dataclass(frozen=True)
class Staged:
    """An adapter whose files are stored, but which no function lists yet."""

    deployment: Deployment
    layout: LoraLayout
    manifest: Manifest | None
    """Manifest of the new version, whose number is taken; None when the function already lists the adapter."""
    version: Resolved
    """The version as nodes load it."""


def deployment_of(
    name: str, version: int | None, layout: LoraLayout, *, created: bool, notes: tuple[str, ...] = ()
) -> Deployment:
    """Returns the result of a deploy of this layout. `version` is None in a dry run. `notes`: further warnings."""
    return Deployment(
        function=name,
        version=version,
        digest=layout.digest,
        ranks=layout.ranks,
        targets=layout.targets,
        bytes=layout.bytes,
        warnings=(*layout.warnings, *notes),
        created=created,
        dtype=layout.dtype,
    )
