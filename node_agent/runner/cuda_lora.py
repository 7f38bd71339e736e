"""LoRA of passes on a GPU. The runner copies a pass's batch to device addresses that it chooses.

A captured pass (a CUDA graph) calls the LoRA kernels of all projection groups, adapted or not. Kernel programs for
empty segments and for rank 0 return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adapters.peft_config import MAX_RANK
from kernels.reference import add_group
from node_agent.adapter_memory.store import AdapterStore
from node_agent.runner.cuda_blocks import LORA_FIELDS, StepFields, lora_batch, send
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.lora import AdaptedGroups, Add, GroupLora, compiled_lora, table_views
from node_agent.runner.lora_choice import CPU_KERNEL
from node_agent.types import LoraBatch

CAPTURED_RANK = MAX_RANK
"""Maximum rank in a captured pass, whose adapters are not known at capture. Scratch memory is allocated for this rank,
but no data is padded to it."""

OpenAdd = Callable[[LoraBatch, bool], Add]
"""Function that takes a LoraBatch on the device, and whether all rows have one token. It returns an Add, which reads
the batch's tensors at each call."""


class SentLora(GroupLora):
    """PassLora of a LoraBatch in host memory.

    The runner copies the batch to the device together with the pass's other data, and then calls `place`. If it is not
    placed, because it is a part of another PassLora, it copies its batch itself at the first `finish`.
    """

    def __init__(self, lora: CudaLora, batch: LoraBatch, decodes: bool) -> None:
        super().__init__(None, AdaptedGroups(lora.weights, batch))
        self.batch, self._lora, self._decodes = batch, lora, decodes

    def place(self, fields: StepFields) -> None:
        """Sets the device tensors that will hold the batch when the pass runs."""
        self._add = self._lora.open_add(lora_batch(fields, self.batch.max_rank), self._decodes)

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        if self._add is None:
            self._add = self._lora.send(self.batch, self._decodes)
        super().finish(layer, group, ys)


class CudaLora:
    """LoRA of a store's adapters for the runner's passes."""

    def __init__(self, store: AdapterStore, stream: Stream, open_add: OpenAdd) -> None:
        self.weights, self._stream, self.open_add = store.weights, stream, open_add

    def start(self, batch: LoraBatch, decodes: bool) -> SentLora:
        """Starts a pass's LoRA, as a StartLora. The batch's tensors are in host memory."""
        return SentLora(self, batch, decodes)

    def send(self, batch: LoraBatch, decodes: bool) -> Add:
        """Enqueues the copy of the batch to the device, and returns its Add."""
        sent = send(self._stream, {name: getattr(batch, name) for name in LORA_FIELDS})
        on_device = LoraBatch(**sent, leases=[], bounds=[], max_rank=batch.max_rank, empty=False)
        return self.open_add(on_device, decodes)


def open_add(store: AdapterStore, kernel: str, max_rows: int, max_tokens: int) -> OpenAdd:
    """Returns the OpenAdd for a store's adapters, by Triton kernels. For CPU_KERNEL it uses the compiled operator, or
    torch's operations if there is no compiled operator."""
    table, pool, base = store.table, store.pool.data, store.base
    if kernel != CPU_KERNEL:
        from node_agent.runner.triton_lora import TritonLora  # a host without a GPU need not load Triton

        return TritonLora(store, max_rows, max_tokens, kernel=kernel).open_add
    compiled = compiled_lora(table, pool, base)
    if compiled is not None:

        def open_compiled(batch: LoraBatch, _: bool) -> Add:
            segments = compiled.segments(batch)
            return lambda layer, group, ys, x: compiled.groups[layer][group].add(ys, x, segments)

        return open_compiled
    groups = table_views(table, pool, base)
    return lambda batch, _: lambda layer, group, ys, x: add_group(ys, x, batch.token_slot, groups[layer][group])
