"""Shows that a commit changed names, docstrings and comments alone.

    python -m tests.lint.same_tree BEFORE AFTER [--strings]

Compares each changed .py file of two commits as syntax trees without names, docstrings, notes under attributes and
comments; a file that moved is compared under its new path. Refuses besides:

- a name that became another without being defined in the changed files (`len` to `max`);
- two names of a scope that became one, unless the first is no longer used where the second begins;
- strings that differ. With --strings those are allowed that hold a renamed name: in tests, and in the product as
  attribute names (getattr and the like), annotations, or dotted names of modules that moved.

Exit status 1 if a file differs.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.lint.tree_comparison import IDENTIFIER_FIELDS, SCOPED, Comparison, Differ, called_name, statements

NAMING_CALLS = {
    "namedtuple",
    "make_dataclass",
    "defstruct",
    "TypedDict",
    "Enum",
    "NewType",
    "TypeVar",
    "SimpleNamespace",
}


@dataclass(frozen=True)
class Change:
    """A .py file of the two commits. An empty source is a file that is not there."""

    old_path: str
    new_path: str
    old_source: str
    new_source: str


@dataclass
class Differences:
    """Differences of one file, as lines to print."""

    refused: list[str] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    """strings that hold a renamed name; refused without --strings"""


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yields each name that the file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias):
            if node.asname:
                yield node.asname
        elif isinstance(node, ast.Call):
            if called_name(node.func) in NAMING_CALLS:
                yield from (keyword.arg for keyword in node.keywords if keyword.arg)
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield from re.findall(r"\w+", part.value)
        elif isinstance(node, SCOPED):
            for name in IDENTIFIER_FIELDS[type(node)]:
                if isinstance(value := getattr(node, name), str):
                    yield value


def module_names(path: str) -> Iterator[str]:
    """Yields the dotted names under which a file can be imported, and their last parts."""
    if path:
        parts = PurePosixPath(path).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for end in range(len(parts)):
            yield ".".join(parts[: end + 1])
            yield parts[end]


def compare(changes: Sequence[Change]) -> dict[str, Differences]:
    """Returns the differences by new path; files without any are left out."""
    comparisons: dict[str, Comparison] = {}
    results: dict[str, Differences] = defaultdict(Differences)
    old_defined, new_defined = set(), set()
    for change in changes:
        old_tree, new_tree = ast.parse(change.old_source), ast.parse(change.new_source)
        old_defined.update(defined_names(old_tree), module_names(change.old_path))
        new_defined.update(defined_names(new_tree), module_names(change.new_path))
        path = change.new_path or change.old_path
        if bool(change.old_path) != bool(change.new_path) and (_has_code(old_tree) or _has_code(new_tree)):
            results[path].refused.append("added" if change.new_path else "removed")
        elif change.old_path and change.new_path:
            comparisons[path] = Comparison(in_tests=path.startswith("tests/"))
            try:
                comparisons[path].compare_modules(old_tree, new_tree)
            except Differ as difference:
                results[path].refused.append(str(difference))
    moved = {
        pair
        for change in changes
        for pair in zip(module_names(change.old_path), module_names(change.new_path), strict=False)
    }
    renamed = {pair for comparison in comparisons.values() for pair in (*comparison.names, *comparison.modules)}
    for path, comparison in comparisons.items():
        refused = results[path].refused
        for (old, new), line in (*comparison.names.items(), *comparison.modules.items()):
            if old not in old_defined and not _is_dotted_local(old, old_defined):
                refused.append(f"line {line}: {old} became {new}, but no changed file defined {old}")
            elif new not in new_defined and not _is_dotted_local(new, new_defined):
                refused.append(f"line {line}: {old} became {new}, but no changed file defines {new}")
            elif hasattr(builtins, new) and not hasattr(builtins, old) and new not in old_defined:
                refused.append(f"line {line}: {old} became {new}, which is a builtin")
        for scope in comparison.scopes:
            refused.extend(scope.merged())
        for old, new, line, attribute in comparison.strings:
            text = f"line {line}: strings changed: {old[:200]!r} -> {new[:200]!r}"
            allowed = comparison.in_tests or attribute or ("." in old and (old, new) in moved)
            if allowed and _holds_renamed(old, new, renamed | moved):
                results[path].strings.append(text)
            else:
                refused.append(text)
    return {path: differences for path, differences in results.items() if differences.refused or differences.strings}


def _has_code(tree: ast.Module) -> bool:
    return any(statements(tree.body))


def _is_dotted_local(name: str, defined: set[str]) -> bool:
    """Returns whether a dotted or relative module name ends in a module of the changed files."""
    return "." in name and name.rpartition(".")[2] in defined


def _holds_renamed(old: str, new: str, renamed: set[tuple[str, str]]) -> bool:
    """Returns whether two strings differ by renamed names alone."""
    olds, news = re.findall(r"\w+|\W", old), re.findall(r"\w+|\W", new)
    if len(olds) != len(news):  # a module moved into another folder
        for one, another in renamed:
            old = re.sub(rf"(?<![\w.]){re.escape(one)}(?!\w)", another, old) if "." in one else old
        return old == new
    parts = {
        pair for one, another in renamed for pair in zip(one.split("."), another.split("."), strict=False) if "." in one
    }
    return all(pair[0] == pair[1] or pair in renamed or pair in parts for pair in zip(olds, news, strict=True))


def read_changes(before: str, after: str) -> tuple[list[Change], list[str]]:
    """Returns the .py files that differ between two commits, and the paths of other files that do."""
    listing = _git("diff", "--name-status", "-z", "-M40%", "-l0", before, after).decode().split("\0")[:-1]
    changes, others = [], []
    while listing:
        status = listing.pop(0)
        old = listing.pop(0)
        new = listing.pop(0) if status[0] in "RC" else old
        if not old.endswith(".py") and not new.endswith(".py"):
            others.append(new)
            continue
        old = "" if status[0] in "AC" else old
        new = "" if status[0] == "D" else new
        changes.append(Change(old, new, _read(before, old), _read(after, new)))
    return changes, others


def _read(commit: str, path: str) -> str:
    return _git("show", f"{commit}:{path}").decode() if path else ""


def _git(*arguments: str) -> bytes:
    return subprocess.run(("git", *arguments), check=True, capture_output=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--strings", action="store_true", help="allow strings that hold a renamed name")
    options = parser.parse_args()
    changes, others = read_changes(options.before, options.after)
    differ = False
    for path, differences in sorted(compare(changes).items()):
        for line in (*differences.refused, *differences.strings):
            print(f"{path}: {line}")
        differ = differ or bool(differences.refused or (differences.strings and not options.strings))
    if others:
        print(f"not compared: {', '.join(others)}")
    print("differ" if differ else f"equal ({len(changes)} files)")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
