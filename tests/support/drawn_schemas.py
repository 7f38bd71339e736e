"""Drawn JSON Schemas of the kinds that calls have, with a bound on the length of what they describe."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "colour", "size", "items", "a b", "ü", "x/y")


def draw_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Returns a schema of an object."""
    schema = _object(rng, depth)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": _draw_value(rng, 0)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _draw_value(rng, depth) for name in names},
        "required": names if rng.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def _draw_value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _number, _enum, _pattern, _boolean]
    if depth:
        kinds += [lambda rng: _object(rng, depth - 1), lambda rng: _array(rng, depth), lambda rng: _any(rng, depth)]
    return rng.choice(kinds)(rng)


def _text(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", 3, None, True, "two words", "ß"], rng.randint(1, 4))}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{1,3}$", "^(yes|no)$", "^[a-z]{1,4}-[a-z]$"])}


def _boolean(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _draw_value(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_draw_value(rng, depth - 1), {"type": "null"}]}
