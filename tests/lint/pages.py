"""Checks the pages of README, CONTRIBUTING and docs: width, tables, links and anchors.

    python -m tests.lint.pages

- A line has at most 100 columns as it is read: targets of links don't count. Tables and blocks of code are left out.
- A table has at most five columns, but for those that `benchmarks.pages.tables` writes.
- A link to a file of the repository finds it, and its anchor a heading; every page is linked from docs/README.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 100
COLUMNS = 5
INDEX = ROOT / "docs" / "README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^\s*```")
MARKER = re.compile(r"^\s*<!-- (/?)[a-z].*-->")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def problems(page: Path) -> list[str]:
    """Returns what is wrong with the page, a line each, with its place."""
    where = page.relative_to(ROOT)
    found = [f"{where}:{number}: {problem}" for number, problem in _line_problems(page)]
    if page.is_relative_to(INDEX.parent) and page not in (INDEX, *_targets(INDEX)):
        found.append(f"{where}: not linked from {INDEX.relative_to(ROOT)}")
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    made: set[str] = set()
    for _, line, code, _ in _lines(page):
        if not code and (heading := re.match(r"#+ (.*)", line)):
            words = LINK.sub("]", heading[1]).lower()
            name = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
            made.add(name if name not in made else f"{name}-1")
    return made


def _line_problems(page: Path) -> Iterator[tuple[int, str]]:
    for number, line, code, written in _lines(page):
        if code:
            continue
        if line.startswith("|"):
            if not written and re.fullmatch(r"[|:\- ]+", line) and line.count("|") > COLUMNS + 1:
                yield number, f"a table of {line.count('|') - 1} columns; at most {COLUMNS} can be read"
        elif len(LINK.sub("]", line)) > WIDTH:
            yield number, f"a line of {len(line)} columns; at most {WIDTH}"
        for target in LINK.findall(line):
            if problem := _link_problem(page, target):
                yield number, problem


def _link_problem(page: Path, target: str) -> str | None:
    """Returns None if the target exists, or is not a file of the repository."""
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"a link to {path}, which does not exist"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return f"a link to {target}, which has no such heading"
    return None


def _targets(page: Path) -> set[Path]:
    return {(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(page.read_text())}


def _lines(page: Path) -> Iterator[tuple[int, str, bool, bool]]:
    """Number, text, whether it belongs to a block of code, whether `benchmarks.pages.tables` writes it."""
    code = written = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line) is not None
        if not code and (marker := MARKER.match(line)):
            written = not marker[1]
        yield number, line, code or fence or (line.startswith("    ") and not line.lstrip().startswith("-")), written
        code ^= fence


def main() -> None:
    found = [problem for page in pages() for problem in problems(page)]
    print("\n".join(found) if found else f"{len(pages())} pages: width, links and anchors are right")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
