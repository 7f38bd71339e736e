"""Processes as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def processes() -> dict[int, tuple[int, str]]:
    """Returns the parent and the state of each process, by its id."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            found[int(entry.name)] = int(parent), state
    return found


def tree(root: int, known: dict[int, tuple[int, str]]) -> list[int]:
    """Returns the ids below `root`, itself included, parents first."""
    found = [root] if root in known else []
    for pid in found:
        found += [child for child, (parent, _) in known.items() if parent == pid]
    return found
