"""Decode: each adapter at its own rank (cost ~ the sum of ranks)."""

from __future__ import annotations

from kernels.decode import launch_decode
from kernels.launch import Launch, launch_for
from kernels.view import LoraCall


def mbgmv(call: LoraCall, how: Launch | None = None) -> None:
    """Adds the adapters' part: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for every segment's tokens t and its
    slot s, fp32 accumulation. `how`: tile sizes; None: those of this device.

    Two launches, no allocation, no host synchronisation; ranks are read on the device. The same batch gives the same
    bits. Raises KernelArgumentError before anything is launched.
    """
    launch_decode(call, False, how or launch_for("mbgmv", call.x.device))
