"""LoRA of a pass by the Triton kernels, which read the AdapterTable on the device and allocate nothing per call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adapters.base_model import BaseModel
from adapters.peft_config import MAX_RANK
from kernels.decode import bgmv, mbgmv
from kernels.launch import Launch, launch_for
from kernels.sgmv import sgmv
from kernels.view import MAX_PROJECTIONS, GroupView, LoraCall
from node_agent.adapter_memory.store import AdapterStore
from node_agent.runner.lora import AdaptedGroups, Add, GroupLora, table_views
from node_agent.types import GROUPS, LoraBatch

DECODE_KERNELS: dict[str, Callable[..., None]] = {"mbgmv": mbgmv, "bgmv": bgmv}
"""Kernel function for each value of `node.lora_kernel` except `auto`. Its scratch memory has room for MAX_RANK, the
highest rank to which a batch is padded."""


class TritonLora:
    """LoRA kernels for all projection groups of a store's adapters, with scratch allocated once for the largest pass.

    A decode pass has at most `max_rows` tokens, any other at most `max_tokens`; a larger one raises
    KernelArgumentError. All passes share the scratch, because their kernels run one after another on one stream.
    `decode` and `prefill` override the kernels' launch settings in tests; None: those tuned for the device. `kernel`
    is that of decode passes, one of DECODE_KERNELS.
    """

    def __init__(
        self,
        store: AdapterStore,
        max_rows: int,
        max_tokens: int,
        decode: Launch | None = None,
        prefill: Launch | None = None,
        kernel: str = "mbgmv",
    ) -> None:
        pool = store.pool.data
        self.weights = store.weights
        self.decode_kernel = DECODE_KERNELS[kernel]
        self.groups = table_views(store.table, pool, store.base)
        self.decode = decode or launch_for(kernel, pool.device)
        self.prefill = prefill or launch_for("sgmv", pool.device)
        self.decode_scratch = _scratch(self.decode, max_rows, pool.device)
        self.prefill_scratch = _scratch(self.prefill, max_tokens, pool.device)
        self._warm(store.base, pool)

    def start(self, batch: LoraBatch, decode: bool) -> GroupLora:
        """Starts a pass's LoRA, as a StartLora. Groups that no adapter of the batch adapts launch nothing."""
        return GroupLora(self.open_add(batch, decode), AdaptedGroups(self.weights, batch))

    def open_add(self, batch: LoraBatch, decode: bool) -> Add:
        """Returns the Add of a batch. `decode`: all rows of the pass have one token."""
        return lambda layer, group, ys, x: self.add(self.groups[layer][group], ys, x, batch, decode)

    def add(self, view: GroupView, ys: Sequence[torch.Tensor], x: torch.Tensor, batch: LoraBatch, decode: bool) -> None:
        """Adds the LoRA terms of x [T, d_in] to the projections' outputs ys, each [T, d_out], by two kernel launches.
        Raises KernelArgumentError."""
        if decode:
            operation, scratch, sizes = self.decode_kernel, self.decode_scratch, self.decode
        else:
            operation, scratch, sizes = sgmv, self.prefill_scratch, self.prefill
        operation(LoraCall(ys, x, batch.seg_start, batch.seg_slot, view, scratch, batch.max_rank), sizes)

    def _warm(self, base: BaseModel, pool: torch.Tensor) -> None:
        """Launches all kernels once, for a token without an adapter, so that no request waits for Triton to compile
        them."""
        starts = torch.tensor([0, 1], dtype=torch.int32, device=pool.device)
        slots = torch.tensor([-1], dtype=torch.int32, device=pool.device)
        batch = LoraBatch(starts, slots, slots, [None], [(0, 1)], max_rank=0, empty=True)
        for group, members in GROUPS.items():
            widths = [base.widths[p][1] for p in members]
            x = torch.zeros(1, base.widths[members[0]][0], dtype=pool.dtype, device=pool.device)
            y = torch.zeros(1, sum(widths), dtype=pool.dtype, device=pool.device)
            ys = torch.split(y, widths, dim=1)
            for decode in (True, False):
                self.add(self.groups[0][group], ys, x, batch, decode)


def _scratch(sizes: Launch, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.empty(sizes.splits, MAX_PROJECTIONS, tokens, MAX_RANK, device=device)
