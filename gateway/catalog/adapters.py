"""Adapters of versions, as nodes get them. Imports neither numpy nor the registry, since clients import it."""

from __future__ import annotations

from adapters.choices import Resolved
from cluster.messages import Adapter


def adapter_of(resolved: Resolved) -> Adapter:
    """Returns the adapter of a version as nodes get it."""
    return Adapter(
        digest=resolved.digest,
        artifact=resolved.artifact_key,
        bytes=resolved.bytes,
        ranks=resolved.ranks,
        itemsize=resolved.itemsize,
        config=resolved.config_sha256,
        weights=resolved.weights_sha256,
    )
