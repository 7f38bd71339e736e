"""A pass's LoRA through a real table: short segments compiled, long ones by torch, torch alone; against float64."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from adapters.artifact import ArtifactHeader, LayerBlock, StoredPair
from adapters.base_model import BaseModel
from kernels.reference import add_group
from kernels.view import group_view
from node_agent.adapter_memory.layout import lay_out
from node_agent.adapter_memory.pool import device_pool
from node_agent.adapter_memory.table import AdapterTable
from node_agent.adapter_memory.weights import AdapterWeights, view_weights
from node_agent.leases import Lease
from node_agent.runner.lora import LONG_SEGMENT, SegmentedLora, compiled_lora
from node_agent.types import GROUPS, LoraBatch

WIDTHS = ((40, 48), (40, 16), (40, 16), (48, 40), (40, 70), (40, 70), (70, 40))
BASE = BaseModel("tiny", "f", "llama", 2, 40, 100, 64, WIDTHS)


class Memory:
    """Adapters of given (rank per projection) in a pool, written straight into the table."""

    def __init__(self, dtype: torch.dtype, adapters: list[dict[int, int]]) -> None:
        torch.manual_seed(0)
        self.pool = device_pool(1 << 20, 4096, torch.device("cpu"), dtype)  # small pages: rows lie in many of them
        self.pool.data.copy_(torch.randn(self.pool.data.shape) * 0.1)
        self.table = AdapterTable(8, 4096, BASE.num_layers, torch.device("cpu"))
        self.weights: dict[str, AdapterWeights] = {}
        self.leases = []
        for slot, ranks in enumerate(adapters):
            pairs = tuple(StoredPair(p, rank, 0.5 + slot, 0, 0) for p, rank in ranks.items())
            block = LayerBlock(0, 0, "", pairs)
            header = ArtifactHeader(1, str(slot), "f", "float32", (block, block))
            layout = lay_out(header, BASE, dtype.itemsize, self.pool.page_units)
            pages = self.pool.pages.take(layout.pages, str(slot))
            run = self.table.reserve(layout.rows)
            assert pages is not None and run is not None
            positions = layout.positions(pages[::-1])
            self.table.set(slot, run, layout, positions)
            self.weights[str(slot)] = view_weights(self.pool, positions, layout, BASE)
            self.leases.append(Lease(str(slot), slot, tuple(ranks.values())))

    def batch(self, segments: list[tuple[int, int]]) -> LoraBatch:
        """(slot or -1, tokens)"""
        ends = torch.tensor([length for _, length in segments]).cumsum(0).tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        slots = torch.tensor([slot for slot, _ in segments], dtype=torch.int32)
        leases = [None if slot < 0 else self.leases[slot] for slot, _ in segments]
        return LoraBatch(
            seg_start=torch.tensor([0, *ends], dtype=torch.int32),
            seg_slot=slots,
            token_slot=slots.repeat_interleave(torch.tensor([length for _, length in segments])),
            leases=leases,
            bounds=bounds,
            max_rank=max((max(lease.ranks) for lease in leases if lease), default=0),
            empty=False,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_mixed_pass(dtype: torch.dtype, compiled: bool) -> None:
    """Adapters of q,k,v, of all seven and of `down` alone; base rows; one segment that is long."""
    memory = Memory(dtype, [{0: 8, 1: 8, 2: 3}, dict.fromkeys(range(7), 20), {6: 5}])
    batch = memory.batch([(-1, 2), (0, 1), (1, 1), (2, 3), (1, LONG_SEGMENT[dtype] + 1), (-1, 1), (0, 5)])
    operator = compiled_lora(memory.table, memory.pool.data, BASE) if compiled else None
    assert (operator is not None) == compiled
    lora = SegmentedLora(batch, lambda lease: memory.weights[lease.digest], operator)
    tokens = batch.token_slot.shape[0]
    for layer in range(BASE.num_layers):
        for group, members in GROUPS.items():
            x = torch.randn(tokens, WIDTHS[members[0]][0]).to(dtype)
            fused = torch.randn(tokens, sum(WIDTHS[p][1] for p in members)).to(dtype)
            ys = list(fused.split([WIDTHS[p][1] for p in members], dim=1))
            wanted = [y.double() for y in ys]
            before = fused.clone()
            table = memory.table
            tensors = (memory.pool.data, table.rank, table.scale, table.first, table.row_offset)
            add_group(wanted, x, batch.token_slot, group_view(*tensors, layer, members))
            assert lora.begin(layer, group, x)
            lora.finish(layer, group, ys)
            for y, want in zip(ys, wanted, strict=True):
                error = (y.double() - want).abs().max() / want.abs().max()
                assert float(error) <= (1e-5 if dtype is torch.float32 else 1e-2)
            assert torch.equal(fused[batch.token_slot < 0], before[batch.token_slot < 0])


def test_without_a_compiler_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    memory = Memory(torch.float32, [])
    with caplog.at_level(logging.WARNING):
        assert compiled_lora(memory.table, memory.pool.data, BASE) is None
    assert [record.reason for record in caplog.records] == [  # type: ignore[attr-defined]
        "no C++ compiler (g++, clang++) is installed"
    ]
