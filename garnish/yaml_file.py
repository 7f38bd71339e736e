"""Reads a YAML file as plain data, with the line of each value.

Size, depth and number of values are limited. Only the tags of plain data are accepted, so no code can
run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from garnish.errors import ServiceFileError

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_VALUES = 50_000
"""Maximum number of values. Aliases are expanded, so a small file could otherwise have exponentially many."""

FieldPath = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_ENVIRONMENT = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


class Document:
    """Content of a YAML file, consisting of dict, list, str, int, float, bool and None."""

    def __init__(self, file: Path, value: Any, lines: Mapping[FieldPath, int]) -> None:
        self.file = file
        self.value = value
        self._lines = lines

    def error(self, path: FieldPath, problem: str) -> ServiceFileError:
        """Returns an error about the field `path`, with the line of that field or of the nearest enclosing one."""
        nearest = path
        while nearest and nearest not in self._lines:
            nearest = nearest[:-1]
        return ServiceFileError(self.file, self._lines.get(nearest), ".".join(path), problem)


def read_yaml(file: Path, environment: Mapping[str, str] | None = None) -> Document:
    """Returns the content of the file.

    `${env:NAME}` in a value is replaced by that variable of `environment`, by default the process's environment. Raises
    ServiceFileError.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")  # some editors begin files with a byte order mark
    except OSError as error:
        raise ServiceFileError(file, None, "", error.strerror or "can't be read") from error
    except UnicodeDecodeError as error:
        raise ServiceFileError(file, data.count(b"\n", 0, error.start) + 1, "", "expected UTF-8 text") from None
    if len(data) > MAX_BYTES:
        raise ServiceFileError(file, None, "", f"expected at most {MAX_BYTES} bytes")
    reader = _Reader(file, os.environ if environment is None else environment)
    root = _compose(file, text)
    value = {} if root is None else reader.value(root, ())
    return Document(file, value, reader.lines)


def _compose(file: Path, text: str) -> Node | None:
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ServiceFileError(file, mark.line + 1 if mark else None, "", f"not valid YAML: {problem}") from None
    except YAMLError as error:
        raise ServiceFileError(file, None, "", f"not valid YAML: {error}") from None
    except RecursionError:
        raise ServiceFileError(file, None, "", "not valid YAML: nested too deep") from None
    return node


class _Reader:
    def __init__(self, file: Path, environment: Mapping[str, str]) -> None:
        self.lines: dict[FieldPath, int] = {}
        self._file = file
        self._environment = environment
        self._count = 0

    def value(self, node: Node, path: FieldPath) -> Any:
        self._count += 1
        if self._count > MAX_VALUES or len(path) > MAX_DEPTH:
            raise self._error(node, path, f"expected at most {MAX_VALUES} values, nested at most {MAX_DEPTH} deep")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        raise self._error(node, path, f"the tag {node.tag} is not allowed")

    def _mapping(self, node: MappingNode, path: FieldPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise self._error(key_node, path, "expected a plain word as key")
            key = str(key_node.value)
            if key in mapping:
                raise self._error(key_node, (*path, key), "the key occurs twice")
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            mapping[key] = self.value(value_node, (*path, key))
        return mapping

    def _scalar(self, node: ScalarNode, path: FieldPath) -> Any:
        text = str(node.value)
        if _ENVIRONMENT.search(text):
            return _ENVIRONMENT.sub(lambda match: self._variable(match[1], node, path), text)
        match str(node.tag).removeprefix(_TAG):
            case "str" | "timestamp":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" | "float" as kind:
                return self._number(node, path, kind, text)
        raise self._error(node, path, f"the tag {node.tag} is not allowed")

    def _number(self, node: ScalarNode, path: FieldPath, kind: str, text: str) -> int | float:
        try:
            return (
                int(text.replace("_", ""), 0 if "0x" in text or "0o" in text else 10) if kind == "int" else float(text)
            )
        except ValueError:
            raise self._error(node, path, f"expected a number, found {text[:50]!r}") from None

    def _variable(self, name: str, node: ScalarNode, path: FieldPath) -> str:
        try:
            return self._environment[name]
        except KeyError:
            raise self._error(node, path, f"the environment variable {name} is not set") from None

    def _error(self, node: Node, path: FieldPath, problem: str) -> ServiceFileError:
        return ServiceFileError(self._file, node.start_mark.line + 1, ".".join(path), problem)
