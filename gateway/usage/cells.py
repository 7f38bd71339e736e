"""Usage as cells: what one gateway's journal has counted of one version in one hour.

A journal's count of a cell only grows, and each object that holds the cell holds it as it was at some time. So the
largest is the newest, and joining two copies of the same usage by the maximum counts it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gateway.usage.counts import UsageCounts


class Cell(NamedTuple):
    hour: str
    source: str
    """The journal's part that counted it: `<gateway>-<part>`."""
    function: str
    version: str


Cells = dict[Cell, UsageCounts]


def join_into(cells: Cells, added: Iterable[tuple[Cell, UsageCounts]]) -> bool:
    """Raises `cells` to the maximum of both, counter by counter. Returns whether that changed anything."""
    changed = False
    for cell, counts in added:
        counted = cells.get(cell)
        joined = counts if counted is None else counted.maximum(counts)
        if joined != counted:
            cells[cell] = joined
            changed = True
    return changed
