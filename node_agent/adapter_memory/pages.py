"""Pages: their size for a base model, and the owner of each. This module touches no memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import ROW_ALIGN, row_units

LARGEST_PAGE = 2 << 20
TYPICAL_RANK = 16
ALLOWED_WASTE = 0.02


def choose_page_size(base: BaseModel, itemsize: int) -> int:
    """Returns the page size in bytes: the largest power of two up to 2 MiB that wastes at most 2 % of a typical
    adapter.

    An adapter wastes on average half a page at its end and, at each page border, half of the widest row. A typical
    adapter has rank 16 on all projections. If all sizes waste more (very small bases), the size with the least waste is
    returned.
    """
    widest = ROW_ALIGN * max(row_units(width, itemsize) for pair in base.widths for width in pair)
    adapter = TYPICAL_RANK * itemsize * base.num_layers * sum(sum(pair) for pair in base.widths)
    smallest = 1 << (widest - 1).bit_length()
    sizes = [LARGEST_PAGE >> shift for shift in range(LARGEST_PAGE.bit_length()) if LARGEST_PAGE >> shift >= smallest]
    if not sizes:
        return smallest
    waste = {size: widest / (2 * size) + size / (2 * adapter) for size in sizes}
    return next((size for size in sizes if waste[size] <= ALLOWED_WASTE), min(sizes, key=waste.__getitem__))


class PageMap:
    """Owner of each of `count` pages. The lowest free pages are allocated first, so that an adapter's pages stay
    adjacent."""

    def __init__(self, count: int) -> None:
        self.owner: list[str | None] = [None] * count
        self._free = list(range(count))

    @property
    def count(self) -> int:
        return len(self.owner)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int, owner: str) -> list[int] | None:
        """Allocates `count` pages for the owner. Returns them in ascending order, or None when fewer are free."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self.owner[page] = owner
        return pages

    def give(self, pages: Sequence[int], owner: str) -> None:
        """Frees an owner's pages. Raises RuntimeError when a page is not `owner`'s."""
        for page in pages:
            if self.owner[page] != owner:
                raise RuntimeError(f"page {page} belongs to {self.owner[page]}, not to {owner}, which frees it")
            self.owner[page] = None
            heapq.heappush(self._free, page)

    def problems(self) -> list[str]:
        """Returns the inconsistencies of the map; empty when each page is either free or owned."""
        free = set(self._free)
        problems = [] if len(free) == len(self._free) else ["a page is free twice"]
        for page, owner in enumerate(self.owner):
            if (owner is None) != (page in free):
                problems.append(f"page {page} is {'free' if page in free else 'not free'} and its owner is {owner}")
        return problems
