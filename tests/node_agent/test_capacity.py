"""How many adapters fit is what really fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.base_model import BaseModel, load_base_model
from node_agent.adapter_memory.layout import ROW_ALIGN
from node_agent.adapter_memory.pages import choose_page_size
from node_agent.adapter_memory.pool import device_pool
from node_agent.engine_process import ready_message
from node_agent.performance.capacity import RANKS, fitting
from tests.support.local_engine import MakeEngine
from tests.support.peft_reference import make_adapter

WIDTHS = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64))
BASE = BaseModel("b", "f", "llama", 3, 64, 256, 128, WIDTHS)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_many_as_their_rows_take(rank: int, dtype: torch.dtype) -> None:
    pool = device_pool(32 << 20, choose_page_size(BASE, dtype.itemsize), torch.device("cpu"), dtype)
    rows = [width * dtype.itemsize for pair in WIDTHS for width in pair]
    one = BASE.num_layers * rank * sum(-(-row // ROW_ALIGN) * ROW_ALIGN for row in rows)
    count = fitting(pool, BASE, rank)
    assert count * one <= pool.size
    assert (count + 1) * (one + 2 * pool.page_size) > pool.size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_refused_is_what_a_node_reports(
    make_engine: MakeEngine, stories_dir: Path, tmp_path: Path, dtype: str
) -> None:
    """A gateway that counts elements by the record's numbers warns of no adapter that is served, and of all that are
    refused but for those within a page of the limit."""
    engine = make_engine(dtype=dtype, adapter_memory=512 << 10)
    record = ready_message(engine.engine, load_base_model(stories_dir, "b"))
    outcomes = set[bool]()
    for rank in (64, 256):
        directory = make_adapter(
            stories_dir, tmp_path / str(rank), 1, r=rank, lora_alpha=rank, target_modules=["q_proj"]
        )
        adapter = engine.deploy(directory, f"r{rank}")
        request = engine.submit([1, 2, 3], 2, adapter)
        engine.run()
        finished = engine.outcomes[request].finished
        assert finished is not None
        needed = adapter.bytes // 4 * record.adapter_itemsize
        refused = finished.error_type == "too_large"
        outcomes.add(refused)
        assert refused or not finished.error_type
        assert refused == (needed > record.largest_adapter)
    assert outcomes == ({True, False} if dtype == "float32" else {False}), "rank 256 fits in bfloat16 alone"
