"""Decodes stored records, also those that a newer release has written.

During an upgrade, and after its rollback, gateways of two releases share a registry. Requests and service files stay
strict: there an unknown field is a mistake that the caller hears of.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

log = logging.getLogger(__name__)
Record = TypeVar("Record")

SECTION_DEPTH = 2
"""The record itself, and its sections."""


def decode_record(data: bytes, kind: type[Record]) -> Record:
    """Returns a record without the fields that this release does not know. Raises msgspec.MsgspecError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        unknown: list[str] = []
        known = _known(msgspec.json.decode(data), inspect.type_info(kind), "", unknown)
        if not unknown:
            raise
    log.warning("a newer release has stored fields that this one does not apply", extra={"fields": unknown})
    return msgspec.convert(known, kind)


def encode_over(stored: bytes, known: Record, changed: Record) -> bytes:
    """Returns `changed` as JSON, with the fields of `stored` that this release does not know: those of the record, and
    of its sections, such as a function's policy. What is below a section is a value: it is written as it was stored if
    it is the same, else as it is now. `known`: what `stored` was read as.

    A record that is deleted, or was, keeps nothing: it begins anew.
    """
    data = msgspec.json.encode(changed)
    if getattr(known, "deleted", False) or getattr(changed, "deleted", False):
        return data
    raw, before, after = msgspec.json.decode(stored), msgspec.to_builtins(known), msgspec.to_builtins(changed)
    return msgspec.json.encode(_carried(raw, before, after, SECTION_DEPTH))


def _carried(raw: Any, before: Any, after: Any, depth: int) -> Any:
    """Returns `after` with what `raw` has and `before` has not; `depth`: levels of mappings in which fields may be
    unknown."""
    if before == after:
        return raw
    if not depth or not all(isinstance(each, dict) for each in (raw, before, after)):
        return after
    unknown = {name: value for name, value in raw.items() if name not in before and name not in after}
    both = {name for name in after if name in before and name in raw}
    changed = {n: _carried(raw[n], before[n], v, depth - 1) if n in both else v for n, v in after.items()}
    return {**changed, **unknown}


def _known(value: Any, of: inspect.Type, at: str, unknown: list[str]) -> Any:
    """Returns `value` without the fields that the type `of` does not have; adds their paths, which begin with `at`, to
    `unknown`."""
    if isinstance(of, inspect.UnionType):
        of = next((each for each in of.types if isinstance(each, inspect.StructType)), of)
    if isinstance(of, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in of.fields}
        unknown += [f"{at}{name}" for name in value if name not in fields]
        return {n: _known(v, fields[n], f"{at}{n}.", unknown) for n, v in value.items() if n in fields}
    if isinstance(of, inspect.DictType) and isinstance(value, dict):
        return {name: _known(each, of.value_type, f"{at}{name}.", unknown) for name, each in value.items()}
    if isinstance(of, inspect.ListType | inspect.VarTupleType) and isinstance(value, list):
        return [_known(each, of.item_type, f"{at}{index}.", unknown) for index, each in enumerate(value)]
    return value
