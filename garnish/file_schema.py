"""Generates the JSON Schema of serverless.yml, for editors, from the loader's types.

`python -m garnish.file_schema` writes serverless.schema.json next to this file. Conditions on several fields, or on the
host, are checked only by the loader. The loader also accepts quoted numbers, because environment variables are text;
the schema accepts only a plain number or a variable.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from adapters.names import NAME
from adapters.open_store import STORES
from garnish.config import BUILT, QUANTITIES, built
from garnish.service_file import WHEEL_URL, Function, Gateway, Infra, Node, NodePool, Tenant, Top
from garnish.sizes import BYTES, SECONDS, parse_rate, parse_seconds, parse_whole_seconds
from gateway.origins import ORIGIN
from node_agent.vllm.arguments import AUTO, COUNTS, RANKS

FILE = Path(__file__).with_name("serverless.schema.json")

SECTIONS: dict[str, type[msgspec.Struct]] = {"gateway": Gateway, "node": Node, "infra": Infra}
NAMED: dict[str, type[msgspec.Struct]] = {"tenants": Tenant, "functions": Function, "node_pools": NodePool}

Schema = dict[str, Any]

_VARIABLE: Schema = {"$ref": "#/$defs/variable"}
_NUMBER = r"(?=.*[1-9])\d+(\.\d+)? ?"


def document() -> Schema:
    """Returns the complete JSON Schema of serverless.yml."""
    (top, *_), definitions = msgspec.json.schema_components(
        [Top, *SECTIONS.values(), *NAMED.values()], ref_template="#/$defs/{name}"
    )
    for kind in definitions.values():
        kind["properties"] = {name: _with_variable(field) for name, field in kind["properties"].items()}
    root = definitions.pop(top["$ref"].rpartition("/")[2])
    for name, field in root["properties"].items():
        root["properties"][name] = _top_field(name, field, definitions, name in root["required"])
    definitions["Function"]["properties"]["alias"] = _or_null(_text(rf"(?!\d+$){NAME.pattern}"))
    _describe_sharing(definitions["Gateway"])
    _describe_vllm(definitions["Node"]["properties"]["vllm"])
    sources = definitions["Gateway"]["properties"]["allowed_sources"]
    sources["anyOf"][0]["items"] = _text(r"(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?|file:///.+)")
    definitions["Gateway"]["properties"]["cors_origins"]["anyOf"][0]["items"] = _text(rf"({ORIGIN.pattern}|\*)")
    definitions["Aws"]["properties"]["package"] = _text(WHEEL_URL)
    definitions["variable"] = {"type": "string", "pattern": r"\$\{env:[A-Za-z_][A-Za-z0-9_]*\}"}
    head = {
        "title": "serverless.yml",
        "description": "A service; docs/guide/serverless-yml.md describes every key.",
    }
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, **head, "$defs": definitions}
    for path, parse in QUANTITIES.items():
        holder, name = _holder(schema, path)
        holder[name] = _quantity(parse)
    for path in BUILT:
        holder, name = _holder(schema, path)
        holder[name] = _only(holder[name], built(path))
    return schema


def _describe_vllm(field: Schema) -> None:
    """Adds the keys that the loader checks. vLLM itself checks the others."""
    counts: Schema = {name: {"type": "integer", "minimum": 1} for name in COUNTS}
    counts["max_loras"] = {"anyOf": [{"const": AUTO}, counts["max_loras"]]}
    field["properties"] = {
        "python": {"type": "string"},
        "any_version": {"type": "boolean"},
        **counts,
        "max_lora_rank": {"enum": list(RANKS)},
        "gpu_memory_utilization": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "kv_share": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    }


def _describe_sharing(gateway: Schema) -> None:
    """Makes the gateway's schema require `redis` for more than one worker.

    Workers share their state in Redis.
    """
    gateway["properties"]["redis"] = _or_null(_text(r"(redis|rediss|unix)://.+"))
    gateway["if"] = {"required": ["workers"], "properties": {"workers": {"type": "number", "minimum": 2}}}
    gateway["then"] = {"required": ["redis"], "properties": {"redis": {"type": "string"}}}


def _top_field(name: str, field: Schema, definitions: Schema, required: bool) -> Schema:
    """Returns the schema of a top-level key. null means that the key is left out, or its section is empty."""
    if name in SECTIONS:
        return _or_null({"$ref": f"#/$defs/{SECTIONS[name].__name__}"})
    if name in NAMED:
        entry: Schema = {"$ref": f"#/$defs/{NAMED[name].__name__}"}
        may_be_empty = not definitions[NAMED[name].__name__]["required"]
        return _or_null(
            {
                "type": "object",
                "propertyNames": {"pattern": _anchored(NAME.pattern)},
                "additionalProperties": _or_null(entry) if may_be_empty else entry,
            }
        )
    if name == "registry":
        return _or_null(_text(rf"(({'|'.join(filter(None, STORES))})://.+|(?![A-Za-z][A-Za-z0-9+.-]*:).+)"))
    return field if required else _or_null(field)


def _with_variable(field: Schema) -> Schema:
    """Returns the field's schema, extended to accept an environment variable if it does not accept text."""
    options = field.get("anyOf", [field])
    if not any("enum" in option or option.get("type") in ("integer", "number") for option in options):
        return field
    default = {"default": field.pop("default")} if "default" in field else {}
    return {"anyOf": [*options, _VARIABLE], **default}


def _quantity(parse: Callable[[object], object]) -> Schema:
    number: list[Schema] = [] if parse is parse_rate else [{"type": "number", "exclusiveMinimum": 0}]
    units = SECONDS if parse in (parse_seconds, parse_whole_seconds) else BYTES
    written = _text(_NUMBER + f"({'|'.join(units)})" + ("/s" if parse is parse_rate else ""))
    words: list[Schema] = [{"const": "auto"}] if _takes_auto(parse) else []
    return {"anyOf": [*number, *words, *written["anyOf"]]}


def _takes_auto(parse: Callable[[object], object]) -> bool:
    try:
        parse("auto")
    except ValueError:
        return False
    return True


def _only(field: Schema, served: tuple[object, ...]) -> Schema | bool:
    """Returns the field's schema restricted to the values `served`, and null if the field allows it.

    Returns False, a schema that accepts nothing, if there are no values.
    """
    nothing = [None] if {"type": "null"} in field.get("anyOf", ()) else []
    values = [*served, *nothing]
    if not values:
        return False
    default = {"default": field["default"]} if field.get("default") in served else {}
    return {"anyOf": [{"enum": values}, _VARIABLE], **default} if served else {"enum": values}


def _holder(schema: Schema, path: str) -> tuple[Schema, str]:
    """Returns the `properties` mapping that contains the last name of a dotted path, and that name.

    `*` in the path is any name or list item.
    """
    holder = schema
    *sections, name = path.split(".")
    for part in sections:
        holder = _resolved(schema, holder["additionalProperties"] if part == "*" else holder["properties"][part])
    return holder["properties"], name


def _resolved(schema: Schema, field: Schema) -> Schema:
    """Returns the schema of the mapping to which a field refers. Raises KeyError if it refers to none."""
    for option in field.get("anyOf", [field]):
        if "$ref" in option and option != _VARIABLE:
            resolved: Schema = schema["$defs"][option["$ref"].rpartition("/")[2]]
            return resolved
        if option.get("type") == "object":
            mapping: Schema = option
            return mapping
        if option.get("type") == "array":
            return {"additionalProperties": option["items"]}
    raise KeyError(f"no mapping: {field}")


def _text(pattern: str) -> Schema:
    return {"anyOf": [{"type": "string", "pattern": _anchored(pattern)}, _VARIABLE]}


def _anchored(pattern: str) -> str:
    return f"^(?:{pattern})$"


def _or_null(field: Schema) -> Schema:
    options = field["anyOf"] if set(field) == {"anyOf"} else [field]
    return {"anyOf": [*options, {"type": "null"}]}


def text() -> str:
    return msgspec.json.format(msgspec.json.encode(document()), indent=2).decode() + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
