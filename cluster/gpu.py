"""Reports of a node's GPU: its load, which changes all the time, and its facts, which hardly do."""

from __future__ import annotations

import msgspec


class GpuLoad(msgspec.Struct, frozen=True, array_like=True):
    """A GPU at its last sample. None: it does not report that value. New fields come last."""

    memory_used: int | None = None
    """Bytes, of all processes on it."""
    utilisation: int | None = None
    """Per cent of the last sample period in which a kernel ran."""
    power: int | None = None
    """Watts."""
    temperature: int | None = None
    """Degrees Celsius."""
    throttled: int | None = None
    """Bits of NVML's clocks event reasons; `throttle_reasons` names them."""


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The GPU of a node, and what is wrong with it."""

    uuid: str
    index: int | None = None
    """Index of the GPU as NVML counts on this host."""
    name: str = ""
    driver: str = ""
    memory: int = 0
    """Bytes in all; 0: not reported."""
    pcie_generation: int = 0
    """The highest that GPU and slot have in common; 0: not reported."""
    pcie_width: int = 0
    """Lanes that GPU and slot have in common."""
    pcie_width_now: int = 0
    """Lanes that are in use."""
    link: float = 0.0
    """Bytes per second that `pcie_generation` and `pcie_width` carry; 0: not known."""
    ecc_corrected: int = 0
    """Errors since the driver was loaded or the GPU was reset."""
    ecc_uncorrectable: int = 0
    xid: int = 0
    """The last Xid error since the node's start; 0: none."""
    xids: int = 0
    """Number of Xid errors since the node's start."""
    slow_link: str = ""
    """Problem of the link to the GPU, if it is slower than it should be."""
    problem: str = ""
    """Reason why values are missing, if they should be there: NVML failed, or does not return."""
    fault: str = ""
    """Reason why the GPU can't be used any more: its node drains, and its pool replaces it."""


THROTTLE_REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
"""NVML's bits that mean that a GPU is held back; idle clocks, and clocks that somebody has set, are none of them."""


def throttle_reasons(bits: int) -> list[str]:
    """Returns the names of what holds a GPU's clocks back, of NVML's mask `bits`; other bits are passed over."""
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
