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


def _known(value: Any, of: inspect.Type, at: str, unknown: list[str]) -> Any:
    """`value` without the fields that `of` does not have; their paths are added to `unknown`."""
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
