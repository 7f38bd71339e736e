"""Texts in Terraform's JSON."""

from __future__ import annotations

import re
from typing import Any

_TEMPLATE = re.compile(r"([$%])\{")


def literal(value: Any) -> Any:
    """The value as Terraform's JSON means it: `${` and `%{` in a text would be templates."""
    if isinstance(value, str):
        return _TEMPLATE.sub(r"\1\1{", value)
    if isinstance(value, dict):
        return {key: literal(entry) for key, entry in value.items()}
    return [literal(entry) for entry in value] if isinstance(value, (list, tuple)) else value
