"""Checks the words of names and docstrings in the product's code, and of the pages, against a table.

    python -m tests.lint.words            fails if a file has more offences of a kind than offenders.txt lists
    python -m tests.lint.words --show FILE...   prints each offence of the files, and what to say instead
    python -m tests.lint.words --update   rewrites offenders.txt; refuses to make it longer

words.toml has the table. Of pages only the phrases are checked, and only in prose: not in code, targets of links, or
what `benchmarks.tables` writes. offenders.txt has today's offences as counts, one line a file; it may only shrink.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
OFFENDERS = FOLDER / "offenders.txt"
PACKAGES = ("adapters", "benchmarks", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
NOT_PROSE = re.compile(
    r"^<!-- (?P<part>[a-z][^\n]*?) -->$.*?^<!-- /(?P=part) -->$"  # written by benchmarks.tables
    r"|^(?P<fence> *```).*?^(?P=fence)|`[^`]+`|(?<=\])\([^)]*\)|<!--.*?-->",
    re.MULTILINE | re.DOTALL,
)
NAME_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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
    )


def check_source(source: str, table: Table) -> Iterator[Offence]:
    """Yields the offences of one file's names, docstrings and attribute notes."""
    for node in ast.walk(ast.parse(source)):
        for name, line in _defined_names(node):
            yield from _check_name(name, line, isinstance(node, ast.ClassDef), table)
        for text, line in _docstrings(node):
            yield from _check_prose(text, line, table)


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
    for pattern, instead in table.phrases.items():
        for match in pattern.finditer(text):
            yield Offence(line, f"phrase {match[0].lower()}", match[0], instead)


def check_page(text: str, table: Table) -> Iterator[Offence]:
    """Yields the offences of a Markdown page's prose."""
    prose = NOT_PROSE.sub(lambda match: "." * len(match[0]), text).replace("\n", " ")
    for pattern, instead in table.phrases.items():
        for match in pattern.finditer(prose):
            yield Offence(text.count("\n", 0, match.start()) + 1, f"phrase {match[0].lower()}", match[0], instead)


def check_file(file: Path, table: Table) -> Iterator[Offence]:
    text = file.read_text()
    return check_page(text, table) if file.suffix == ".md" else check_source(text, table)


def count_offences(table: Table) -> dict[str, Counter[str]]:
    """Returns the number of offences by file (relative path) and kind; files without any are left out."""
    counts = {}
    for pattern in (*PAGES, *(f"{package}/**/*.py" for package in PACKAGES)):
        for file in ROOT.glob(pattern):
            if kinds := Counter(offence.kind for offence in check_file(file, table)):
                counts[file.relative_to(ROOT).as_posix()] = kinds
    return counts


def parse_counts(text: str) -> dict[str, Counter[str]]:
    """Reads what `format_counts` wrote."""
    counts: dict[str, Counter[str]] = {}
    for line in text.splitlines():
        path, _, rest = line.partition(": ")
        pairs = (entry.rpartition("=") for entry in rest.split(", "))
        counts[path] = Counter({kind: int(count) for kind, _, count in pairs})
    return counts


def format_counts(counts: dict[str, Counter[str]]) -> str:
    lines = (
        f"{path}: " + ", ".join(f"{kind}={count}" for kind, count in sorted(kinds.items()))
        for path, kinds in sorted(counts.items())
    )
    return "".join(f"{line}\n" for line in lines)


def new_offences(counts: dict[str, Counter[str]], listed: dict[str, Counter[str]]) -> list[str]:
    """Returns a line for each file and kind of which there are more than listed."""
    return [
        f"{path}: {kind}: {count}, {listed.get(path, Counter())[kind]} listed"
        for path, kinds in counts.items()
        for kind, count in kinds.items()
        if count > listed.get(path, Counter())[kind]
    ]


def total(counts: dict[str, Counter[str]]) -> int:
    return sum(kinds.total() for kinds in counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    table = load_table()
    if options.show:
        for file in options.show:
            for offence in sorted(check_file(file, table), key=lambda offence: offence.line):
                print(f"{file}:{offence.line}: {offence.kind}: {offence.text!r}: {offence.instead}")
        return 0
    counts = count_offences(table)
    listed = parse_counts(OFFENDERS.read_text()) if OFFENDERS.exists() else counts
    if options.update and total(counts) <= total(listed):  # files may have been moved
        OFFENDERS.write_text(format_counts(counts))
    elif new := new_offences(counts, listed):
        print("\n".join([*new, "See them with: python -m tests.lint.words --show FILE"]), file=sys.stderr)
        return 1
    elif counts != listed:
        print("Fewer offences than listed: python -m tests.lint.words --update", file=sys.stderr)
        return 1
    print(f"words: {total(counts)} offences left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
