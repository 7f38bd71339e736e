"""The file with a node's performance model. Does not import torch."""

from __future__ import annotations

import logging
from pathlib import Path

from cluster.performance_file import BadPerformanceFile, PerformanceProfile, read_performance
from cluster.performance_model import ModelKey

log = logging.getLogger("garnish.engine")


def performance_file(profile: str) -> Path:
    """Returns the path of the performance file, in the folder of the cold-start profile."""
    return Path(profile).with_suffix(".performance.json")


def stored_performance(profile: str | None, key: ModelKey) -> PerformanceProfile | None:
    """Returns the stored profile that was measured under these conditions; None if there is none. `profile`: file of
    the cold-start profile; None: nothing is stored."""
    file = performance_file(profile) if profile else None
    if file is None or not file.exists():
        return None
    try:
        return read_performance(file, key)
    except (BadPerformanceFile, OSError) as error:
        log.warning("the performance model is not used", extra={"reason": str(error)})
        return None
