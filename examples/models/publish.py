"""Publish a model directory whole or not at all, and recognise one that is already there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

RECEIPT = "conversion.json"
"""Written last into a converted directory; its content says what the directory was made from."""


def is_published(target: Path, receipt: dict[str, str]) -> bool:
    """Whether `target` holds the finished outcome of exactly this conversion."""
    try:
        return bool(json.loads((target / RECEIPT).read_bytes()) == receipt)
    except (OSError, ValueError):
        return False


def publish(target: Path, receipt: dict[str, str], write: Callable[[Path], None]) -> None:
    """Let `write` fill a new directory beside `target`, then rename it into place.

    A reader sees the old directory or the new one, never half of one. When another process publishes the same
    conversion first, its directory stands and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh = staging / "new"
        fresh.mkdir()
        write(fresh)
        (fresh / RECEIPT).write_text(json.dumps(receipt, indent=2, sort_keys=True) + "\n")
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors writes 0600
        if target.exists() and not is_published(target, receipt):
            os.rename(target, staging / "old")
        try:
            os.rename(fresh, target)
        except OSError:
            if not is_published(target, receipt):
                raise
    finally:
        shutil.rmtree(staging)
