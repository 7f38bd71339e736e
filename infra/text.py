"""Escapes strings for Terraform's JSON, and writes files atomically."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

_TEMPLATE = re.compile(r"([$%])\{")


def literal(value: Any) -> Any:
    """Returns the value with `${` and `%{` escaped, which begin templates in Terraform's JSON."""
    if isinstance(value, str):
        return _TEMPLATE.sub(r"\1\1{", value)
    if isinstance(value, dict):
        return {literal(key): literal(entry) for key, entry in value.items()}  # keys are templates, too
    return [literal(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def write_atomically(file: Path, text: str) -> None:
    """Writes the file atomically, readable only by its owner. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # created with mode 0600
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
