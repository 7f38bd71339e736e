"""Checks the words of names, docstrings and messages in the product's code, and of the pages, against words.toml.

    python -m tests.lint.words            prints each offence of all files, and what to say instead
    python -m tests.lint.words FILE...    prints those of the files

Messages are the texts of raised errors and log lines. Of them only the phrases are checked. So it is with pages, and
only in prose: not in code, targets of links, or what
`benchmarks.pages.tables` writes. Names that are written to the wire, to stored records or to reports stay where
words.toml lists them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
PACKAGES = ("adapters", "benchmarks", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
NOT_PROSE = re.compile(
    r"^<!-- (?P<part>[a-z][^\n]*?) -->$.*?^<!-- /(?P=part) -->$"  # written by benchmarks.pages.tables
    r"|^(?P<fence> *```).*?^(?P=fence)|`[^`]+`|(?<=\])\([^)]*\)|<!--.*?-->",
    re.MULTILINE | re.DOTALL,
)
NAME_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


@dataclass(frozen=True)
class Table:
    """The content of words.toml. Each mapping is from what is refused to what to say instead."""

    names: dict[str, str]
    prefixes: dict[str, str]
    classes: dict[str, str]
    phrases: dict[re.Pattern[str], str]
    openings: frozenset[str]
    max_first_sentence: int
    """words"""
    written_names: dict[str, frozenset[str]]
    """Names that stay, by file (relative path): they are field names of a wire format, a stored record or a report."""


@dataclass(frozen=True)
class Offence:
    line: int
    kind: str
    """what is counted: the refused word, or the rule"""
    text: str
    instead: str


def load_table(file: Path = FOLDER / "words.toml") -> Table:
    content = tomllib.loads(file.read_text())
    return Table(
        names=content["names"],
        prefixes=content["prefixes"],
        classes=content["classes"],
        phrases={re.compile(pattern, re.IGNORECASE): instead for pattern, instead in content["phrases"].items()},
        openings=frozenset(content["openings"]["words"]),
        max_first_sentence=content["lengths"]["first_sentence"],
        written_names={file: frozenset(names) for file, names in content["written_names"].items()},
    )


def check_source(source: str, table: Table) -> Iterator[Offence]:
    """Yields the offences of one file's names, docstrings and attribute notes."""
    for node in ast.walk(ast.parse(source)):
        for name, line in _defined_names(node):
            yield from _check_name(name, line, isinstance(node, ast.ClassDef), table)
        for text, line in _docstrings(node):
            yield from _check_prose(text, line, table)
        for text, line in _messages(node):
            yield from _check_phrases(text, line, table)


def _defined_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields each name that the node defines, with its line."""
    if isinstance(node, NAME_NODES):
        yield node.name, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno


def _docstrings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the texts that stand as statements of their own: docstrings, and notes under attributes."""
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else ():
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value.strip(), statement.lineno


def _messages(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the texts in the arguments of a raised error or of a log line."""
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call):
        return
    is_log = isinstance(call.func, ast.Attribute) and call.func.attr in LOG_METHODS
    if isinstance(node, ast.Raise) or is_log:
        for argument in call.args:
            for part in ast.walk(argument):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value, part.lineno


def _check_name(name: str, line: int, is_class: bool, table: Table) -> Iterator[Offence]:
    bare = name.strip("_")
    if is_class and bare in table.classes:
        yield Offence(line, f"class {bare}", name, table.classes[bare])
    elif bare in table.names:
        yield Offence(line, f"name {bare}", name, table.names[bare])
    else:
        for prefix, instead in table.prefixes.items():
            if bare.startswith(prefix):
                yield Offence(line, f"name {prefix}*", name, instead)


def _check_prose(text: str, line: int, table: Table) -> Iterator[Offence]:
    opening = text.split(maxsplit=1)[0].rstrip(",.:;") if text else ""
    if opening in table.openings:
        yield Offence(line, "opening", text[:60], "begin with a noun or a verb")
    first = re.split(r"(?<=[.!?:])\s|\n\n", text, maxsplit=1)[0]
    if len(first.split()) > table.max_first_sentence:
        yield Offence(line, "length", first[:60], f"{table.max_first_sentence} words at most in the first sentence")
    yield from _check_phrases(text, line, table)


def _check_phrases(text: str, line: int, table: Table) -> Iterator[Offence]:
    for pattern, instead in table.phrases.items():
        for match in pattern.finditer(text):
            yield Offence(line, f"phrase {match[0].lower()}", match[0], instead)


def check_page(text: str, table: Table) -> Iterator[Offence]:
    """Yields the offences of a Markdown page's prose."""
    prose = NOT_PROSE.sub(lambda match: "." * len(match[0]), text).replace("\n", " ")
    for pattern, instead in table.phrases.items():
        for match in pattern.finditer(prose):
            yield Offence(text.count("\n", 0, match.start()) + 1, f"phrase {match[0].lower()}", match[0], instead)


def check_file(path: str, table: Table) -> list[Offence]:
    """Returns the offences of a file of the project in the order of lines. `path`: relative."""
    text, stays = (ROOT / path).read_text(), table.written_names.get(path, frozenset())
    offences = check_page(text, table) if path.endswith(".md") else check_source(text, table)
    return sorted((each for each in offences if each.text.strip("_") not in stays), key=lambda offence: offence.line)


def project_files() -> list[str]:
    """Returns the relative paths of all pages and of the product's code."""
    patterns = (*PAGES, *(f"{package}/**/*.py" for package in PACKAGES))
    return sorted(file.relative_to(ROOT).as_posix() for pattern in patterns for file in ROOT.glob(pattern))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="relative to the project's root")
    table, count = load_table(), 0
    for path in parser.parse_args().files or project_files():
        for offence in check_file(path, table):
            print(f"{path}:{offence.line}: {offence.kind}: {offence.text!r}: {offence.instead}")
            count += 1
    print(f"words: {count} offences")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
