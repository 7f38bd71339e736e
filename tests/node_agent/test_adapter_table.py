"""The AdapterTable on a device with a stream: an adapter is switched in while a step is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.artifact import ArtifactHeader, LayerBlock, StoredPair
from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import lay_out
from node_agent.adapter_memory.table import AdapterTable, TableShape

WIDTHS = ((40, 48), (40, 16), (40, 16), (48, 40), (40, 70), (40, 70), (70, 40))
BASE = BaseModel("tiny", "f", "llama", 2, 40, 100, 64, WIDTHS)


class OnGpu(torch.Tensor):
    """Passes for memory of a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Copies(TorchDispatchMode):
    """Says of each copy whether the host would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.waits.append(not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)))
        return func(*args, **(kwargs or {}))


def test_nobody_waits_for_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes from pinned memory, by copies that are enqueued: any other would wait for the step."""
    pinned: list[torch.Tensor] = []

    def pin(source: torch.Tensor) -> torch.Tensor:
        pinned.append(source.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    block = LayerBlock(0, 0, "", (StoredPair(0, 8, 0.5, 0, 0), StoredPair(6, 3, 2.0, 0, 0)))
    layout = lay_out(ArtifactHeader(1, "d", "f", "float32", (block, block)), BASE, 4, 64)
    memory = torch.zeros(TableShape(3, BASE.num_layers, 200).words, dtype=torch.int32).as_subclass(OnGpu)
    table = AdapterTable(3, 200, BASE.num_layers, torch.device("cpu"), memory)
    run, positions = table.reserve(layout.rows), layout.positions(list(range(layout.pages)))
    assert run is not None
    with Copies() as copies:
        table.set(1, run, layout, positions)
        table.clear(2, 0, 0)
    assert len(pinned) == len(copies.waits) == 4 and not any(copies.waits)
    assert table.rank[1].tolist() == layout.rank.tolist() and table.scale[1].tolist() == layout.scale.tolist()
    assert table.first[1].tolist() == (layout.first + run).tolist()
    assert table.row_offset[run : run + layout.rows].tolist() == positions.tolist()
