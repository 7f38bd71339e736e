"""Four ways to give adapters device memory, as books without memory: what `benchmarks.adapter_memory.memory` compares.

Each says which bytes of the pool are lost: to padding inside what an adapter takes, and to free bytes that lie outside
the largest piece of memory that one adapter could have.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Protocol

from adapters.artifact import ArtifactHeader, LayerBlock, StoredPair
from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import ROW_ALIGN, AdapterLayout, lay_out
from node_agent.adapter_memory.pages import PageMap, choose_page_size
from node_agent.adapter_memory.runs import FreeRuns
from node_agent.adapter_memory.table import rows_for


@dataclass(frozen=True)
class Shape:
    """An adapter of one rank on some projections of every layer, at two bytes per weight."""

    base: BaseModel
    rank: int
    projections: tuple[int, ...]

    @property
    def live(self) -> int:
        """Bytes of weights."""
        return 2 * self.rank * self.base.num_layers * sum(sum(self.base.widths[p]) for p in self.projections)


class Allocator(Protocol):
    used: int
    """Bytes that adapters occupy, padding included."""

    def place(self, name: int, shape: Shape) -> bool:
        """False, and nothing changed, when there is no room now."""

    def remove(self, name: int) -> None: ...

    def unusable(self) -> int:
        """Free bytes outside the largest piece that one adapter could have."""


class Pages:
    """Pages, as AdapterStore has them: its page size, layout, page map and runs of the AdapterTable."""

    def __init__(self, pool: int, base: BaseModel) -> None:
        self.page = choose_page_size(base, 2)
        self.map = PageMap(pool // self.page)
        self.runs = FreeRuns(rows_for(pool // ROW_ALIGN, base, 2))
        self.lost = pool % self.page
        self.used = 0
        self._layouts: dict[Shape, AdapterLayout] = {}
        self._placed: dict[int, tuple[list[int], int, int]] = {}

    def place(self, name: int, shape: Shape) -> bool:
        layout = self._layouts.get(shape) or self._layouts.setdefault(shape, self._lay_out(shape))
        if layout.pages > self.map.free:
            return False
        run = self.runs.take(layout.rows)
        if run is None:
            return False
        pages = self.map.take(layout.pages, str(name))
        assert pages is not None
        self._placed[name] = pages, run, layout.rows
        self.used += layout.size
        return True

    def remove(self, name: int) -> None:
        pages, run, rows = self._placed.pop(name)
        self.map.give(pages, str(name))
        self.runs.give(run, rows)
        self.used -= len(pages) * self.page

    def unusable(self) -> int:
        return self.lost

    def _lay_out(self, shape: Shape) -> AdapterLayout:
        pairs = tuple(StoredPair(p, shape.rank, 1.0, 0, 0) for p in shape.projections)
        blocks = (LayerBlock(0, 0, "", pairs),) * shape.base.num_layers
        header = ArtifactHeader(1, "", "", "float16", blocks)
        return lay_out(header, shape.base, 2, self.page // ROW_ALIGN)


class Slots:
    """Fixed slots, each for the largest adapter."""

    def __init__(self, pool: int, largest: Shape) -> None:
        self.slot = largest.live
        self.free, self.lost = divmod(pool, self.slot)
        self.used = 0

    def place(self, name: int, shape: Shape) -> bool:  # noqa: ARG002 - one slot is as good as another, for any shape
        if not self.free:
            return False
        self.free -= 1
        self.used += self.slot
        return True

    def remove(self, name: int) -> None:  # noqa: ARG002
        self.free += 1
        self.used -= self.slot

    def unusable(self) -> int:
        return self.lost


class BestFit:
    """A contiguous run of bytes per adapter, in the smallest gap that holds it."""

    def __init__(self, pool: int) -> None:
        self.used = 0
        self._gaps = [(0, pool)] if pool else []
        """(start, length), by start."""
        self._placed: dict[int, tuple[int, int]] = {}

    def place(self, name: int, shape: Shape) -> bool:
        need = shape.live
        fitting = [(length, i) for i, (_, length) in enumerate(self._gaps) if length >= need]
        if not fitting:
            return False
        _, i = min(fitting)
        start, length = self._gaps[i]
        self._gaps[i : i + 1] = [(start + need, length - need)] if length > need else []
        self._placed[name] = start, need
        self.used += need
        return True

    def remove(self, name: int) -> None:
        start, length = self._placed.pop(name)
        self.used -= length
        i = bisect.bisect(self._gaps, (start, length))
        end = start + length
        low = high = i
        if i < len(self._gaps) and self._gaps[i][0] == end:
            end, high = sum(self._gaps[i]), i + 1
        if i and sum(self._gaps[i - 1]) == start:
            start, low = self._gaps[i - 1][0], i - 1
        self._gaps[low:high] = [(start, end - start)]

    def unusable(self) -> int:
        lengths = [length for _, length in self._gaps]
        return sum(lengths) - max(lengths, default=0)


class UnifiedRows:
    """Our code after S-LoRA's pool: rows of the base's hidden width, any of them; a wider weight row takes several."""

    def __init__(self, pool: int, base: BaseModel) -> None:
        self.row = 2 * base.hidden_size
        self.free, self.lost = divmod(pool, self.row)
        self.used = 0
        self._placed: dict[int, int] = {}

    def place(self, name: int, shape: Shape) -> bool:
        widths = [width for p in shape.projections for width in shape.base.widths[p]]
        rows = shape.rank * shape.base.num_layers * sum(-(-2 * width // self.row) for width in widths)
        if rows > self.free:
            return False
        self.free -= rows
        self._placed[name] = rows
        self.used += rows * self.row
        return True

    def remove(self, name: int) -> None:
        rows = self._placed.pop(name)
        self.free += rows
        self.used -= rows * self.row

    def unusable(self) -> int:
        return self.lost
