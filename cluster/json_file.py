"""Measurements that are kept as JSON files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


def write_json(value: msgspec.Struct, file: Path) -> None:
    """Writes the value to the file atomically: a reader sees the old one or the new one, also when two processes write
    it at once. Makes the folder; raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
