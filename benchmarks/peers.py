"""Other projects' LoRA kernels on the same weights, where they can be imported. None of this has been run yet."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from kernels.reference import lora_rows
from tests.support.kernel_cases import Case

VLLM = ((0, 20), (0, 33))
"""First and last minor version whose lora_shrink, lora_expand and LoRAKernelMeta are called as below"""


class NoPeer(Exception):
    """The peer's kernels can't be run here, and why."""


def vllm_run(case: Case) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """(its outputs, one call that adds to them). Weights are padded to the largest rank, as it wants them.

    Raises NoPeer.
    """
    try:
        found = version("vllm")
        minor = tuple(int(part) for part in found.split(".")[:2])
        if not VLLM[0] <= minor <= VLLM[1]:
            raise NoPeer(f"vllm {found} is not one of the versions known here, {VLLM[0]} to {VLLM[1]}")
        ops = import_module("vllm.lora.ops.triton_ops")
    except (PackageNotFoundError, ImportError, ValueError) as error:
        raise NoPeer(f"vllm: {error}") from error
    a, b = _stacked(case)
    tokens, widths = case.x.shape[0], [y.shape[1] for y in case.ys]
    meta = ops.LoRAKernelMeta.make(len(case.ranks), tokens, device=case.x.device)
    meta.prepare_tensors(case.token_slot)
    how = meta.meta_args(tokens, False)
    y = torch.cat(case.ys, dim=1)
    xa = torch.zeros(len(widths), tokens, case.max_rank, dtype=torch.float32, device=case.x.device)

    def run() -> None:
        ops.lora_shrink(case.x, a, xa.zero_(), *how, 1.0)
        ops.lora_expand(xa, b, y, *how, offset_start=0, add_inputs=True)

    return list(torch.split(y, widths, dim=1)), run


def _stacked(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per projection A [slots, 1, largest rank, d_in] and B [slots, 1, d_out, largest rank], the scale in B."""
    view, d_in, slots = case.view, case.x.shape[1], len(case.ranks)
    stacks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for p, y in enumerate(case.ys):
        a = torch.zeros(slots, 1, case.max_rank, d_in, dtype=case.x.dtype, device=case.x.device)
        b = torch.zeros(slots, 1, y.shape[1], case.max_rank, dtype=case.x.dtype, device=case.x.device)
        for slot, rank in enumerate(case.ranks):
            if rank:
                at = view.first[slot, p].tolist()
                a[slot, 0, :rank] = lora_rows(view.pool, view.row_offset[at[0] : at[0] + rank], d_in)
                rows = lora_rows(view.pool, view.row_offset[at[1] : at[1] + rank], y.shape[1])
                b[slot, 0, :, :rank] = (rows.float() * view.scale[slot, p]).to(b.dtype).T
        stacks[0].append(a)
        stacks[1].append(b)
    return stacks


PEERS = {"vllm": vllm_run}


def installed_peers() -> list[str]:
    return [name for name in PEERS if find_spec(name) is not None]
