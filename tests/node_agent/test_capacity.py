"""How many adapters fit is what really fits."""

from __future__ import annotations

import pytest
import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import ROW_ALIGN
from node_agent.adapter_memory.pages import choose_page_size
from node_agent.adapter_memory.pool import device_pool
from node_agent.capacity import RANKS, fitting

WIDTHS = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64))
BASE = BaseModel("b", "f", "llama", 3, 64, 256, 128, WIDTHS)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_as_their_rows_take(rank: int, dtype: torch.dtype) -> None:
    pool = device_pool(32 << 20, choose_page_size(BASE, dtype.itemsize), torch.device("cpu"), dtype)
    rows = [width * dtype.itemsize for pair in WIDTHS for width in pair]
    one = BASE.num_layers * rank * sum(-(-row // ROW_ALIGN) * ROW_ALIGN for row in rows)
    count = fitting(pool, BASE, dtype.itemsize, rank)
    assert count * one <= pool.size
    assert (count + 1) * (one + 2 * pool.page_size) > pool.size
