"""Atomic writing of JSON files, for measurements."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


def write_json(value: msgspec.Struct, file: Path) -> None:
    """Writes the value to the file atomically: readers get the old or the new value, even if two processes write at
    once. Creates the folder. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
