"""Decode as Punica's BGMV: every adapter padded to the batch's largest rank (cost ~ batch x largest rank)."""

from __future__ import annotations

from kernels.decode import launch_decode
from kernels.launch import Launch, launch_for
from kernels.view import LoraCall


def bgmv(call: LoraCall, how: Launch | None = None) -> None:
    """Adds the adapters' part: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp, with A_sp and B_sp padded by zero rows
    to the largest rank that the batch's slots have for projection p. `how`: tile sizes; None: those of this device.

    Padding costs what it costs Punica (Chen et al. 2023), whose weights are stored with it: the AdapterTable has no
    such rows, so what lies behind an adapter's first row is read in their place, and set to zero. The largest rank is
    found on the device: a captured graph serves any ranks. Two launches, no allocation, no host synchronisation; the
    same batch gives the same bits. Raises KernelArgumentError before anything is launched.
    """
    launch_decode(call, True, how or launch_for("bgmv", call.x.device))
