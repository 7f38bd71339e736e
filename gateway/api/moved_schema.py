"""JSON Schemas inside of others: references that stay right when a schema moves."""

from __future__ import annotations

from typing import Any

VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""


def moved(schema: Any, place: str) -> Any:
    """Returns the schema as it must be when it stands at `place`, a JSON pointer in another schema.

    Its references to its own parts begin with `place`. Schemas with an `$id` refer to themselves, and stay as they are.
    """
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    if key in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: moved(inner, place) for name, inner in value.items()}
    if key in VALUES:
        return value
    return moved(value, place)
