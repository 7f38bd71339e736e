"""A pass's LoRA when the runner sends the batch: segments lie at addresses that the runner chooses, on the device.

A captured pass calls the operations for every projection group, whatever its adapters adapt: padded segments and ranks
of 0 end their programs at once.
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
"""The bound on ranks in a captured pass, which serves any adapters: scratch has room for it, and nothing is padded to
it."""

OpenAdd = Callable[[LoraBatch, bool], Add]
"""(a LoraBatch on the device, whether every row has one token) -> Add; the batch's tensors are read at each call"""


class SentLora(GroupLora):
    """The PassLora of a batch that was made in host memory.

    The runner sends it with the pass's batch and says so by `place`. Where it is a part of another PassLora (some rows'
    adapters are on their way), it sends itself at its first `begin`.
    """

    def __init__(self, lora: CudaLora, batch: LoraBatch, decodes: bool) -> None:
        super().__init__(None, AdaptedGroups(lora.weights, batch))
        self.batch, self._lora, self._decodes = batch, lora, decodes

    def place(self, fields: StepFields) -> None:
        """The batch lies there on the device when the pass runs."""
        self._add = self._lora.open_add(lora_batch(fields, self.batch.max_rank), self._decodes)

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        if self._add is None:
            self._add = self._lora.send(self.batch, self._decodes)
        super().finish(layer, group, ys)


class CudaLora:
    """The adapters of a store, as the runner's passes use them."""

    def __init__(self, store: AdapterStore, stream: Stream, open_add: OpenAdd) -> None:
        self.weights, self._stream, self.open_add = store.weights, stream, open_add

    def start(self, batch: LoraBatch, decodes: bool) -> SentLora:
        """A StartLora; the batch's tensors are in host memory."""
        return SentLora(self, batch, decodes)

    def send(self, batch: LoraBatch, decodes: bool) -> Add:
        """Enqueues the batch's copy to the device."""
        sent = send(self._stream, {name: getattr(batch, name) for name in LORA_FIELDS})
        on_device = LoraBatch(**sent, leases=[], bounds=[], max_rank=batch.max_rank, empty=False)
        return self.open_add(on_device, decodes)


def open_add(store: AdapterStore, kernel: str, max_rows: int, max_tokens: int) -> OpenAdd:
    """Returns what opens the adapters' additions: by Triton's kernels, or for CPU_KERNEL by the compiled operator, or
    plain torch where it can't be had."""
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
