"""Measures what the tests catch: draws small faults in the product's code, and runs the tests that touch each of them.

    python -m tests.mutants draw          writes LIST: COUNT mutants, drawn with SEED
    python -m tests.mutants touch DIR     runs the tests in a copy, DIR, and notes which files execute which mutant
    python -m tests.mutants run DIR JSON  applies one mutant after the other in DIR, and writes which tests fail

A mutant changes one operator, number or call in the body of a function. Functions that Triton compiles are left out: a
kernel has no place for the line that records who executes it. `run` stops at a mutant's first failing test, and after
LIMIT_S seconds; test files with the shortest run time come first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")
LIST = ROOT / "tests" / "data" / "mutants.json"
SEED, COUNT = 48, 30
LIMIT_S = 180.0
"""Seconds for the tests of one mutant."""
SWAPPED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
RECORDER = '''"""Records which test files execute which mutant."""

import os

_FILE, _seen = {file!r}, set()


def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(_FILE, "a") as file:
            file.write(f"{{number}} {{test}}\\n")
'''


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    """1-based, as in `text`: where it was when the mutant was drawn"""
    statement: int
    """first line of the statement around it"""
    column: int
    """offset of `before` in `text`"""
    before: str
    after: str
    text: str
    """the line without its indentation"""


def candidates(file: Path) -> Iterator[Mutant]:
    """Yields every mutant of a file."""
    source = file.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for each in lines:
        starts.append(starts[-1] + len(each))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: Any) -> tuple[int, int]:
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    for statement, node in _nodes(ast.parse(source)):
        for begin, end, before, after in _changes(node, span):
            before = before or source[begin:end]
            at = source.find(before, begin, end)
            if at >= 0:
                line = source.count("\n", 0, at) + 1
                text = lines[line - 1].strip()
                column = at - starts[line - 1] - lines[line - 1].index(text)
                name = str(file.relative_to(ROOT))
                yield Mutant(name, line, _first_line(statement), column, before, after, text)


def _changes(node: ast.AST, span: Any) -> Iterator[tuple[int, int, str, str]]:
    """Yields (begin, end, before, after): what changes in this node lies between the offsets; it is all of that where
    `before` is empty."""
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for i, operator in enumerate(node.ops):
            yield span(operands[i])[1], span(operands[i + 1])[0], *SWAPPED[type(operator)]
    elif isinstance(node, ast.BoolOp):
        yield span(node.values[0])[1], span(node.values[1])[0], *SWAPPED[type(node.op)]
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        if not any(
            isinstance(each, ast.Constant | ast.JoinedStr) and _is_text(each) for each in (node.left, node.right)
        ):
            yield span(node.left)[1], span(node.right)[0], *SWAPPED[type(node.op)]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield span(node)[0], span(node.operand)[0], "not ", ""
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        begin, end = span(node)
        changed = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
        yield begin, end, "", str(changed)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield *span(node.func), node.func.id, CALLS[node.func.id]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str | bytes)


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Yields the nodes in bodies of functions, each with the statement before which a line may be inserted."""

    def walk(node: ast.AST, statement: ast.stmt | None, inside: bool) -> Iterator[tuple[ast.stmt, ast.AST]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if "jit" not in "".join(ast.dump(each) for each in node.decorator_list):
                for child in node.body:
                    yield from walk(child, child, True)
            return
        if isinstance(node, ast.JoinedStr | ast.Assert) or _is_log(node):
            return
        if inside and statement is not None:
            yield statement, node
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (isinstance(node, ast.AnnAssign) and name == "annotation"):
                    is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and name == "orelse"
                    new = isinstance(child, ast.stmt) and not is_elif
                    yield from walk(child, child if new else statement, inside)

    yield from walk(tree, None, False)


def _is_log(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return isinstance(call, ast.Constant)  # a docstring
    return isinstance(call.func.value, ast.Name) and call.func.value.id == "log"


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", ())
    return decorators[0].lineno if decorators else statement.lineno


def draw() -> list[Mutant]:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    every = [mutant for file in files for mutant in candidates(file)]
    return sorted(
        random.Random(SEED).sample(every, COUNT), key=lambda mutant: (mutant.file, mutant.line, mutant.column)
    )


def mutants() -> list[Mutant]:
    return [Mutant(**each) for each in json.loads(LIST.read_text())]


def shift(lines: list[str], mutant: Mutant) -> int:
    """Returns by how many lines the mutant's line has moved since it was drawn. Raises ValueError if it is gone."""
    found = [number for number, line in enumerate(lines, 1) if line.strip() == mutant.text]
    if not found:
        raise ValueError(f"{mutant.file}:{mutant.line}: there is no line {mutant.text!r} any more")
    return min((number - mutant.line for number in found), key=abs)


def apply(file: Path, mutant: Mutant) -> None:
    """Writes the fault into the file. Raises ValueError as `shift` does."""
    lines = file.read_text().splitlines(keepends=True)
    at = mutant.line + shift(lines, mutant) - 1
    begin = lines[at].index(mutant.text) + mutant.column
    lines[at] = lines[at][:begin] + mutant.after + lines[at][begin + len(mutant.before) :]
    file.write_text("".join(lines))


def record(copy: Path, number: int, mutant: Mutant) -> None:
    """Inserts a line before the mutant's statement that records the test file that runs it."""
    file = copy / mutant.file
    lines = file.read_text().splitlines(keepends=True)
    at = mutant.statement + shift(lines, mutant) - 1
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines.insert(at, f"{indent}__import__('cluster.mutant_recorder').mutant_recorder.hit({number})\n")
    file.write_text("".join(lines))


def touch(copy: Path) -> None:
    """Runs the tests in `copy` with a line before each mutant's statement that records the running test's file, and
    writes `touched.json` there: for each mutant, test files with their seconds."""
    hits, junit = copy / ".hits", copy / ".junit.xml"
    hits.write_text("")
    (copy / "cluster" / "mutant_recorder.py").write_text(RECORDER.format(file=str(hits)))
    for number, mutant in enumerate(mutants()):
        record(copy, number, mutant)
    _pytest(copy, ["-m", "not slow", "-n", "3", "--dist", "loadfile", f"--junitxml={junit}"], None)
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(junit).iter("testcase"):
        seconds[_file_of_case(copy, case.get("classname", ""))] += float(case.get("time", 0))
    touched: list[dict[str, float]] = [{} for _ in mutants()]
    for line in hits.read_text().splitlines():
        index, _, file = line.partition(" ")
        if file:
            touched[int(index)][file] = round(seconds[file], 1)
    (copy / "touched.json").write_text(json.dumps(touched, indent=1) + "\n")


def _file_of_case(copy: Path, name: str) -> str:
    """Returns the test file of a class name in JUnit's report: tests.a.test_b or tests.a.test_b.TestClass."""
    path = Path(*name.split("."))
    for each in (path, *path.parents):
        if (copy / each).with_suffix(".py").is_file():
            return str(each.with_suffix(".py"))
    return name


def run(copy: Path, touched: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Returns, for each mutant, whether a test failed, which one, and the seconds of that run."""
    rows = []
    for number, (mutant, files) in enumerate(zip(mutants(), touched, strict=True)):
        path = copy / mutant.file
        source = path.read_text()
        begun = time.monotonic()
        try:
            apply(path, mutant)
            names = sorted(files, key=lambda name: files[name])
            outcome, test = _verdict(copy, names) if names else ("untouched", "")
        finally:
            path.write_text(source)
        seconds = round(time.monotonic() - begun, 1)
        rows.append(asdict(mutant) | {"outcome": outcome, "test": test, "files": len(names), "seconds": seconds})
        sys.stderr.write(f"{number} {mutant.file} {mutant.text}: {outcome} {test} {seconds}\n")
    return rows


def _verdict(copy: Path, names: list[str]) -> tuple[str, str]:
    code, output = _pytest(copy, ["-m", "not slow", "-x", "-p", "no:randomly", *names], LIMIT_S)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code is None:
        return "time is up", ""
    return ("caught", failed[0].split()[1] if failed else "") if code in (1, 2, 3, 4) else ("missed", "")


def _pytest(copy: Path, options: list[str], limit: float | None) -> tuple[int | None, str]:
    """Runs pytest on `copy`. Returns its exit status, None after `limit` seconds, and its output."""
    env = os.environ | {"PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-q", *options]
    process = subprocess.Popen(
        command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("draw", "touch", "run"))
    parser.add_argument("copy", nargs="?", type=Path)
    parser.add_argument("report", nargs="?", type=Path)
    options = parser.parse_args()
    if options.what == "draw":
        LIST.write_text(json.dumps([asdict(mutant) for mutant in draw()], indent=1) + "\n")
    elif options.what == "touch":
        touch(options.copy.absolute())
    else:
        touched = json.loads((options.copy / "touched.json").read_text())
        options.report.write_text(json.dumps(run(options.copy.absolute(), touched), indent=1) + "\n")


if __name__ == "__main__":
    main()
