"""Reports about a node's GPU: its load, which changes all the time, and its facts, which rarely change."""

from __future__ import annotations

import msgspec


class GpuLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of a GPU at its last sample. A field is None if the GPU does not report it. New fields come last."""

    memory_used: int | None = None
    """Device memory used by all processes, in bytes."""
    utilisation: int | None = None
    """Percentage of the last sample period in which a kernel ran."""
    power: int | None = None
    """Power draw in watts."""
    temperature: int | None = None
    """Temperature in degrees Celsius."""
    throttled: int | None = None
    """Bit mask of NVML's clocks event reasons; `throttle_reasons` names them."""


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of a node's GPU, and its problems."""

    uuid: str
    index: int | None = None
    """NVML index of the GPU on this host."""
    name: str = ""
    driver: str = ""
    memory: int = 0
    """Total device memory in bytes; 0: not reported."""
    pcie_generation: int = 0
    """Highest PCIe generation that both GPU and slot support; 0: not reported."""
    pcie_width: int = 0
    """Number of PCIe lanes that both GPU and slot support."""
    pcie_width_now: int = 0
    """Number of PCIe lanes in use."""
    link: float = 0.0
    """Bandwidth of a PCIe link of `pcie_generation` and `pcie_width`, in bytes per second; 0: unknown."""
    ecc_corrected: int = 0
    """Number of corrected ECC errors since the driver was loaded or the GPU was reset."""
    ecc_uncorrectable: int = 0
    xid: int = 0
    """Code of the last Xid error since the node's start; 0: none."""
    xids: int = 0
    """Number of Xid errors since the node's start."""
    slow_link: str = ""
    """Description of the problem if the link to the GPU is slower than it should be; else empty."""
    problem: str = ""
    """Reason why expected values are missing: NVML failed, or does not return. Else empty."""
    fault: str = ""
    """Reason why the GPU is unusable, so that its node drains and its pool replaces it. Else empty."""


THROTTLE_REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Names of the NVML bits that mean throttling. Idle clocks, and clocks that a user has set, are not throttling."""


def throttle_reasons(bits: int) -> list[str]:
    """Returns the names of the throttle reasons in NVML's mask `bits`. Other bits are ignored."""
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
