"""The schema of the AWS provider's resources that the modules use, by the provider's published bindings for the CDK.

What is used of the bindings is kept in provider_schema.json, for half a gigabyte is much to install for it. After
`pip install '.[infra-check]'`, `python tests/infra/provider_bindings.py` writes it anew; the bindings are read as text.

A block is {"attributes": {NAME: {"type": ..., "required": true, "optional": true, "computed": true}}, "blocks": {NAME:
{"nesting": "list" or "set", "most": 1 or 0 (any), "required": bool, "block": ...}}}; types are Terraform's own.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "infra" / "modules"
PACKAGE = "cdktn_provider_aws"
EXTRACT = Path(__file__).with_name("provider_schema.json")
USED = re.compile(r'^(resource|data) "(aws_\w+)"', re.MULTILINE)
CLASS = re.compile(r"^class (\w+) extends cdktn\.(\w+) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
FIELD = re.compile(
    r"^    // (\w+) - computed: (\w+), optional: (\w+), required: (\w+)\n(.*?)(?=^    // \w+ - computed|\Z)",
    re.DOTALL | re.MULTILINE,
)
NESTED = re.compile(r'new (\w+?)(List|OutputReference)\(this, "\w+"(?:, (true|false))?\)')
PLAIN = re.compile(
    r"(tolist\()?this\.get(String|Number|Boolean|List|NumberList|StringMap)Attribute\(|(StringMap)\(this"
)
TYPES: dict[str, Any] = {
    "String": "string", "Number": "number", "Boolean": "bool", "List": ["list", "string"],
    "NumberList": ["list", "number"], "StringMap": ["map", "string"],
}  # fmt: skip
Block = dict[str, Any]


def pin() -> str:
    """The version of the bindings that the project names."""
    (found,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["infra-check"]
    return str(found)


def package_directory() -> Path | None:
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def used_types() -> set[tuple[str, str]]:
    """("resource" or "data", type) of all that the modules state."""
    return {found for file in MODULES.glob("aws_*/*.tf") for found in USED.findall(file.read_text())}


def schema(package: Path) -> dict[str, Any]:
    """As it is kept: which bindings, the provider's version, and the blocks of resources and data sources."""
    files = {}
    for kind, name in used_types():
        folder = name.replace("aws_", "", 1) if kind == "resource" else f"data_{name}"
        files[f"package/lib/{folder.replace('_', '-')}/index.js"] = kind, name
    found: dict[str, Any] = {"bindings": pin(), "provider": "", "resource": {}, "data": {}}
    (bundle,) = (package / "_jsii").glob("*.tgz")
    with tarfile.open(bundle) as tar:
        for member in tar:
            if member.name in files:
                stream = tar.extractfile(member)
                assert stream is not None
                text, (kind, name) = stream.read().decode(), files[member.name]
                found[kind][name] = _resource(text)
                found["provider"] = re.findall(r"providerVersion: '(.*)'", text)[0]
    return found


def _resource(text: str) -> Block:
    classes = {name: body for name, _, body in CLASS.findall(text)}
    (main,) = (name for name, parent, _ in CLASS.findall(text) if parent.startswith("Terraform"))
    return _block(classes, main)


def _block(classes: dict[str, str], name: str) -> Block:
    attributes: dict[str, Any] = {}
    blocks: dict[str, Any] = {}
    for field, *flags, body in FIELD.findall(classes[name]):
        given = [
            flag for flag, value in zip(("computed", "optional", "required"), flags, strict=True) if value == "true"
        ]
        nested = NESTED.search(body)
        if nested is None:
            attributes[field] = {"type": _type(body), **dict.fromkeys(given, True)}
            continue
        inner, nesting = _block(classes, f"{nested[1]}OutputReference"), "set" if nested[3] == "true" else "list"
        if "computed" in given:
            attributes[field] = {"type": [nesting, _object(inner)], **dict.fromkeys(given, True)}
        else:
            most = 1 if nested[2] == "OutputReference" else 0
            blocks[field] = {"nesting": nesting, "most": most, "required": "required" in given, "block": inner}
    return {"attributes": attributes, "blocks": blocks}


def _type(body: str) -> Any:
    found = PLAIN.search(body)
    assert found is not None, body
    kind = TYPES[found[2] or found[3]]
    return ["set", kind[1]] if found[1] else kind


def _object(block: Block) -> Any:
    fields = {name: given["type"] for name, given in block["attributes"].items()}
    return ["object", fields | {name: [b["nesting"], _object(b["block"])] for name, b in block["blocks"].items()}]


def text_of(kept: dict[str, Any]) -> str:
    """A line for each resource, in a stable order."""
    ordered = {**kept, "resource": dict(sorted(kept["resource"].items())), "data": dict(sorted(kept["data"].items()))}
    return re.sub(r'(?<=[{ ])("aws_\w+": )', r"\n\1", json.dumps(ordered)) + "\n"


def main() -> None:
    package = package_directory()
    if package is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install '.[infra-check]'")
    EXTRACT.write_text(text_of(schema(package)))


if __name__ == "__main__":
    main()
