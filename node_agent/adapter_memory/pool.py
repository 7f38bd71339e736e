"""Adapter memory of one tier: a single allocation, divided into pages."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import ROW_ALIGN, AdapterLayout, Span, lay_out_uniform, row_units
from node_agent.adapter_memory.pages import PageMap

MADV_HUGEPAGE = 14
"""value of the constant in Linux"""


class Pool:
    """Memory of one tier. `data` is a flat tensor of the pool's dtype; positions are in ROW_ALIGN units.

    Only the engine's thread allocates and frees pages. Loader threads access only the bytes of pages that they are
    given.
    """

    def __init__(self, data: torch.Tensor, page_size: int) -> None:
        self.data, self.page_size = data, page_size
        self.page_units = page_size // ROW_ALIGN
        self.pages = PageMap(data.nbytes // page_size)
        self._per_unit = ROW_ALIGN // data.element_size()

    @property
    def size(self) -> int:
        return self.pages.count * self.page_size

    @property
    def free_bytes(self) -> int:
        return self.pages.free * self.page_size

    def uniform_layout(self, base: BaseModel, rank: int, projections: Sequence[int]) -> AdapterLayout:
        """Returns the layout in this pool of an adapter with the same rank and projections in every layer."""
        return lay_out_uniform(base, rank, projections, self.data.element_size(), self.page_units)

    def span(self, page: int, span: Span) -> torch.Tensor:
        """Returns the flat elements of a span of one page."""
        at = page * self.page_units
        return self.data[(at + span.begin) * self._per_unit : (at + span.end) * self._per_unit]

    def matrix(self, start: int, rows: int, width: int) -> torch.Tensor:
        """Returns a view [rows, width] of consecutive rows. `start`: offset of the first row from the pool's start, in
        ROW_ALIGN units."""
        stride = row_units(width, self.data.element_size()) * self._per_unit
        return self.data.as_strided((rows, width), (stride, 1), start * self._per_unit)


def device_pool(size: int, page_size: int, device: torch.device, dtype: torch.dtype) -> Pool:
    """Returns a pool of the whole pages that fit in `size` bytes. Raises ValueError when the pool is too large for the
    AdapterTable's offsets."""
    if size // ROW_ALIGN >= 1 << 31:
        raise ValueError(
            f"adapter_memory: {size} bytes are more than the {(1 << 31) * ROW_ALIGN} that can be addressed"
        )
    paged_size = size // page_size * page_size
    if device.type != "cpu" or sys.platform != "linux":
        return Pool(torch.zeros(paged_size // dtype.itemsize, dtype=dtype, device=device), page_size)
    data = torch.empty(paged_size // dtype.itemsize, dtype=dtype)
    _ask_for_huge_pages(data)
    return Pool(data.zero_(), page_size)


def _ask_for_huge_pages(data: torch.Tensor) -> None:
    """Requests 2 MiB pages from the kernel before the first write. A decode step reads rows all over the pool, and has
    fewer TLB misses with them. Kernels without huge pages refuse, which is ignored."""
    page = 1 << 12
    begin = -(-data.data_ptr() // page) * page
    length = (data.data_ptr() + data.nbytes) // page * page - begin
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_HUGEPAGE)
