"""Arguments of the AWS provider's resources, by its published bindings for the CDK, and those that a module states.

What the modules use of the bindings is kept in provider_arguments.json, for half a gigabyte is much to install for it.
After `pip install '.[infra-check]'`, `python tests/infra/provider_bindings.py` writes it anew; the bindings are read as
text.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tarfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "infra" / "modules"
PACKAGE = "cdktn_provider_aws"
EXTRACT = Path(__file__).with_name("provider_arguments.json")
META = {"lifecycle", "depends_on", "for_each", "count", "provider"}
"""Terraform's own arguments."""
INTERFACE = re.compile(r"export interface (\w+)[^{]*\{\n(.*?)\n\}", re.DOTALL)


class Argument(NamedTuple):
    required: bool
    type: str


class Block(NamedTuple):
    """Of HCL: the names of what it states, and the blocks in it by name."""

    arguments: set[str]
    blocks: dict[str, list[Block]]


Interfaces = dict[str, dict[str, Argument]]


class Known(NamedTuple):
    """Of a resource type: its interfaces' arguments by HCL's names, and the attributes that it has."""

    interfaces: Interfaces
    attributes: set[str]


def package_directory() -> Path | None:
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def pin() -> str:
    """The version of the bindings that the project names."""
    (found,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["infra-check"]
    return str(found)


def stored() -> tuple[str, dict[str, Known]]:
    """The pin that the extract was made with, and its types."""
    held = json.loads(EXTRACT.read_text())
    types = {
        kind: Known(
            {
                name: {argument: Argument(*given) for argument, given in arguments.items()}
                for name, arguments in interfaces.items()
            },
            set(attributes),
        )
        for kind, (interfaces, attributes) in held["types"].items()
    }
    return held["bindings"], types


def used_types() -> set[str]:
    """By all modules, as `resources` names them."""
    return {kind for file in MODULES.glob("aws_*/*.tf") for kind, _ in resources(file.read_text())}


def definitions(package: Path, types: set[str]) -> dict[str, Known]:
    """By resource type (data sources as data_TYPE)."""
    files = {}
    for name in types:
        folder = name.replace("aws_", "", 1) if not name.startswith("data_") else name
        files[f"package/lib/{folder.replace('_', '-')}/index.d.ts"] = name
    found = {}
    (bundle,) = (package / "_jsii").glob("*.tgz")
    with tarfile.open(bundle) as tar:
        for member in tar:
            if member.name in files:
                stream = tar.extractfile(member)
                assert stream is not None
                text = stream.read().decode()
                interfaces = {name: _arguments(body) for name, body in INTERFACE.findall(text)}
                found[files[member.name]] = Known(interfaces, set(re.findall(r"^    get (\w+)\(", text, re.MULTILINE)))
    return found


def _arguments(body: str) -> dict[str, Argument]:
    """The documentation before each property names it for HCL."""
    found = {}
    for part in re.split(r"(?=    /\*\*\n)", body):
        link = re.search(r"#(\w+) \w+#(\w+)\}", part)
        declared = re.search(r"readonly \w+(\??): ([^;]+);", part)
        if link and declared:
            found[link[2]] = Argument(not declared[1], " ".join(declared[2].split()))
    return found


def resources(text: str) -> dict[tuple[str, str], Block]:
    """(type, name) of each resource and data source (its type as data_TYPE) of a formatted file."""
    written = r'^(resource|data) "(\w+)" "(\w+)" \{(?:\}|\n(.*?)^\})'
    return {
        (("data_" if kind == "data" else "") + resource, name): _block(body, 2)
        for kind, resource, name, body in re.findall(written, text, re.DOTALL | re.MULTILINE)
    }


def _block(body: str, indent: int) -> Block:
    """By indentation, which `terraform fmt` fixes."""
    margin = " " * indent
    arguments = set(re.findall(rf"^{margin}(\w+)\s+= ", body, re.MULTILINE))
    blocks: dict[str, list[Block]] = {}
    nested = rf"^{margin}(\w+) \{{(?:\}}|\n(.*?)^{margin}\}})"
    for name, inner in re.findall(nested, body, re.DOTALL | re.MULTILINE):
        blocks.setdefault(name, []).append(_block(inner, indent + 2))
    return Block(arguments, blocks)


REFERENCE = re.compile(r"\b(data\.)?(aws_\w+)\.(\w+)(?:\.(\w+))?")


def references(text: str) -> set[tuple[str, str, str]]:
    """(type, name, attribute or nothing) of all that is referred to outside of comments."""
    bare = re.sub(r"#.*$", "", text, flags=re.MULTILINE)
    return {
        (("data_" if data else "") + kind, name, attribute) for data, kind, name, attribute in REFERENCE.findall(bare)
    }


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def problems(where: str, block: Block, kind: str, known: Interfaces) -> list[str]:
    """What the provider would not understand, or miss."""
    declared = known[kind]
    stated = (block.arguments | set(block.blocks)) - META
    found = [f"{where}: {name} is no argument" for name in sorted(stated - set(declared))]
    needed = [name for name, argument in declared.items() if argument.required]
    found += [f"{where}: {name} is missing" for name in needed if name not in stated]
    for name, inner in block.blocks.items():
        nested = re.match(r"\w+", declared[name].type) if name in declared else None
        if nested and nested[0] in known:
            for each in inner:
                found += problems(f"{where}.{name}", each, nested[0], known)
    return found


def main() -> None:
    package = package_directory()
    if package is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install '.[infra-check]'")
    types = {
        kind: [known.interfaces, sorted(known.attributes)] for kind, known in definitions(package, used_types()).items()
    }
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(types[kind])}" for kind in sorted(types))
    EXTRACT.write_text(f'{{"bindings": {json.dumps(pin())}, "types": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
