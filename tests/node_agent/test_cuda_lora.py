"""LoRA at fixed addresses: captured for any adapters, its segments padded, and sent by itself where it is a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from adapters.base_model import BaseModel
from kernels.reference import add_group
from node_agent.adapter_memory.store import AdapterStore
from node_agent.leases import Lease
from node_agent.runner import cuda_lora
from node_agent.runner.cuda_blocks import fill_lora, lora_spec, size_of, views
from node_agent.runner.cuda_lora import CAPTURED_RANK, CudaLora, OpenAdd, open_add
from node_agent.runner.cuda_runner import CudaRunner, open_runner
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.lora import GroupLora, table_views
from node_agent.runner.lora_choice import CPU_KERNEL
from node_agent.runner.triton_lora import TritonLora
from node_agent.types import GROUPS, LoraBatch, RunnerSettings
from tests.node_agent.adapter_world import World, loaded_lease
from tests.node_agent.test_triton_lora import SMALL

pytestmark = pytest.mark.usefixtures("quick_interpreter")
ROWS = 6
"""Of a captured pass; a batch has fewer."""


@pytest.fixture
def open_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[AdapterStore], OpenAdd]:
    def by_triton(store: AdapterStore) -> OpenAdd:
        monkeypatch.setattr(TritonLora, "_warm", lambda *_: None)  # compiles nothing here, and takes a second
        return TritonLora(store, ROWS, ROWS, SMALL, SMALL).open_add

    def by_torch(store: AdapterStore) -> OpenAdd:
        monkeypatch.setattr(cuda_lora, "compiled_lora", lambda *_: None)
        return open_add(store, CPU_KERNEL, ROWS, ROWS)

    return {"triton": by_triton, "torch": by_torch, "compiled": lambda store: open_add(store, CPU_KERNEL, ROWS, ROWS)}[
        request.param
    ]


def batch_of(slots: list[int], leases: list[Lease | None]) -> LoraBatch:
    """A token per segment."""
    ends = torch.arange(len(slots) + 1, dtype=torch.int32)
    segments = torch.tensor(slots, dtype=torch.int32)
    return LoraBatch(ends, segments, segments, leases, [(i, i + 1) for i in range(len(slots))], 0, empty=False)


def drawn(base: BaseModel, group: str, rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    widths = [base.widths[p] for p in GROUPS[group]]
    y = torch.randn(rows, sum(out for _, out in widths))
    return torch.randn(rows, widths[0][0]), list(y.split([out for _, out in widths], dim=1))


@pytest.mark.parametrize("open_by", ["compiled", "torch", "triton"], indirect=True)
def test_one_capture_serves_any_batch(
    open_by: Callable[[AdapterStore], OpenAdd], world: World, make_store: Callable[..., AdapterStore]
) -> None:
    """Two adapters, the base and padding, then others, at the same addresses; rows of padding stay as they are."""
    torch.manual_seed(0)
    store = make_store()
    leases = [loaded_lease(store, adapter) for adapter in world.adapters[:2]]
    slots = [lease.slot for lease in leases]
    block = torch.zeros(size_of(lora_spec(ROWS, ROWS)), dtype=torch.uint8)
    fields = views(lora_spec(ROWS, ROWS), block)
    add = GroupLora(
        open_by(store)(LoraBatch(**fields, leases=[], bounds=[], max_rank=CAPTURED_RANK, empty=False), True)
    )
    groups, group = table_views(store.table, store.pool.data, store.base), "qkv"
    changed = 0
    for used in ([slots[0], slots[1], -1], [slots[1]], [-1, slots[0], slots[0], slots[1]]):
        fill_lora(fields, batch_of(used, []))
        assert fields["token_slot"].tolist() == used + [-1] * (ROWS - len(used))
        for layer in range(0, store.base.num_layers, 2):
            x, ys = drawn(store.base, group, ROWS)
            wanted = [y.clone() for y in ys]
            add_group(wanted, x, fields["token_slot"], groups[layer][group])
            changed += sum(not torch.equal(y, want) for y, want in zip(ys, wanted, strict=True))
            rest = [y[len(used) :].clone() for y in ys]
            assert add.begin(layer, group, x)
            add.finish(layer, group, ys)
            torch.testing.assert_close(torch.cat(ys, 1), torch.cat(wanted, 1), atol=1e-4, rtol=1e-4)
            assert torch.equal(torch.cat(rest, 1), torch.cat([y[len(used) :] for y in ys], 1))
    assert changed, "the adapters change nothing"


def test_a_part_of_another_lora_sends_itself(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """Once, and only where its adapter adapts something."""

    class Counting(Stream):
        uploads = 0

        def upload(self, device: torch.Tensor, host: torch.Tensor, size: int) -> None:
            self.uploads += 1
            super().upload(device, host, size)

    torch.manual_seed(0)
    store, stream = make_store(), Counting()
    lease = loaded_lease(store, world.adapters[0])
    lora = CudaLora(store, stream, open_add(store, CPU_KERNEL, ROWS, ROWS))
    part = lora.start(replace(batch_of([lease.slot], [lease]), max_rank=max(lease.ranks)), True)
    groups, added = table_views(store.table, store.pool.data, store.base), 0
    for layer in range(store.base.num_layers):
        for group in GROUPS:
            x, ys = drawn(store.base, group, 1)
            wanted = [y.clone() for y in ys]
            add_group(wanted, x, torch.tensor([lease.slot]), groups[layer][group])
            if part.begin(layer, group, x):
                part.finish(layer, group, ys)
                added += 1
            torch.testing.assert_close(torch.cat(ys, 1), torch.cat(wanted, 1), atol=1e-4, rtol=1e-4)
    assert added and stream.uploads == 1


def test_steps_that_can_not_be_captured_are_named(
    world: World, make_store: Callable[..., AdapterStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunnerSettings(world.model_dir, torch.device("cpu"), torch.float32, 16, lambda _: 8)
    runner = open_runner(settings)
    assert isinstance(runner, CudaRunner)

    def fail(_: object, work: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Stream, "capture", fail)
    with pytest.raises(RuntimeError, match=r"steps of 2 rows: operation not.*; set node.runner: transformers"):
        runner.serve(make_store(), CPU_KERNEL, max_rows=2, chunk_tokens=8, max_context=64)


def test_a_batch_without_adapters_is_padding() -> None:
    fields = {name: torch.full(shape, 7, dtype=dtype) for name, (dtype, shape) in lora_spec(3, 2).items()}
    fill_lora(fields, None)
    found = SimpleNamespace(**{name: tensor.tolist() for name, tensor in fields.items()})
    assert (found.seg_start, found.seg_slot, found.token_slot) == ([0, 0, 0], [-1, -1], [-1, -1, -1])
