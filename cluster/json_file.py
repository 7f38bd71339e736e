"""Measurements that are kept as JSON files."""

from __future__ import annotations

from pathlib import Path

import msgspec


def write_json(value: msgspec.Struct, file: Path) -> None:
    """Atomically: a reader sees the old one or the new one. Makes the folder; raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    part.replace(file)
