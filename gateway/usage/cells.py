"""Usage cells: counts of one version in one hour, from one gateway's journal.

A journal's counts of a cell only grow, and each object that contains the cell has a copy from some point in time. So
the largest copy is the newest, and merging copies by the maximum counts the usage once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gateway.usage.counts import UsageCounts


class Cell(NamedTuple):
    hour: str
    source: str
    """Id of the sums that contain the cell, `<gateway>-<part>`: the gateway's id in its journal, and `Sums.part`, which
    distinguishes this gateway's sums of the same hour."""
    function: str
    version: str


Cells = dict[Cell, UsageCounts]


def join_into(cells: Cells, added: Iterable[tuple[Cell, UsageCounts]]) -> bool:
    """Merges `added` into `cells` by the maximum of each counter. Returns whether anything changed."""
    changed = False
    for cell, counts in added:
        counted = cells.get(cell)
        joined = counts if counted is None else counted.maximum(counts)
        if joined != counted:
            cells[cell] = joined
            changed = True
    return changed
