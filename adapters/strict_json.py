"""Strict parsing of untrusted JSON: each text has one meaning, or is an error."""

from __future__ import annotations

import codecs
import json
import math
from typing import Any


class InvalidJson(ValueError):
    """The text is not valid JSON by RFC 8259 and its I-JSON profile, or exceeds the limits of `loads`."""


def loads(data: bytes) -> Any:
    """Returns the value of UTF-8 JSON. Raises InvalidJson where parsers disagree or a value can't be represented.

    Apart from syntax errors, it refuses NaN and Infinity (also by overflow, such as 1e999), duplicate keys and lone
    surrogates. It also refuses nesting deeper than the interpreter's stack, and integers of more than 4,300 digits.
    """
    try:
        if data.startswith(codecs.BOM_UTF8):
            raise InvalidJson("it begins with a BOM, a byte order mark")
        value = _decode(data.decode("utf-8"))
        # Python accepts escaped lone surrogates in strings, but they can't be encoded as UTF-8 again.
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise InvalidJson("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidJson("it is not UTF-8") from None
    except UnicodeEncodeError:
        raise InvalidJson("a string holds half of a surrogate pair") from None
    except InvalidJson:
        raise
    except json.JSONDecodeError as error:
        raise InvalidJson(str(error)) from None
    except ValueError:  # the interpreter's message would mention its settings
        raise InvalidJson("a whole number has too many digits") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_key: dict[str, Any] = {}
    for key, value in pairs:
        if key in by_key:
            raise InvalidJson(f"the key {key[:100]!r} occurs twice in one object")
        by_key[key] = value
    return by_key


def _refuse_constant(text: str) -> float:
    raise InvalidJson(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJson(f"the number {text[:40]} is too large")
    return value


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite).decode
