"""Reads a GPU's identity, load and errors by NVML, and decides whether it can still be used."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cluster.gpu import GpuFacts, GpuLoad
from node_agent.gpu.nvml import Nvml

TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
"""Transfers per second of one lane, by PCIe generation."""
PAYLOAD = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 236 / 256}
"""Share of payload in the transferred bits, 0 to 1, by PCIe generation. The rest is line code and, from generation 6
on, overhead of frames."""
FATAL_XIDS = {
    48: "an uncorrectable ECC error",
    64: "a memory row that can't be remapped",
    79: "the GPU has fallen off the bus",
    95: "an uncontained ECC error",
    140: "an unrecovered ECC error",
}
"""Xid errors after which a GPU must be reset or replaced before further use (NVIDIA, "Xid Errors"). Errors such as 13,
31 and 43 are mostly faults of a program, and 94 ends that program alone."""


def read_identity(nvml: Nvml, handle: Any, uuid: str) -> GpuFacts:
    """Reads the constant facts of a GPU. Raises GpuFailed."""
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    generation = nvml.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle) or 0
    width = nvml.ask("nvmlDeviceGetMaxPcieLinkWidth", handle) or 0
    return GpuFacts(
        uuid=uuid,
        index=nvml.ask("nvmlDeviceGetIndex", handle),
        name=nvml.ask("nvmlDeviceGetName", handle) or "",
        driver=nvml.ask("nvmlSystemGetDriverVersion") or "",
        memory=memory.total if memory is not None else 0,
        pcie_generation=generation,
        pcie_width=width,
        link=link_bandwidth(generation, width),
    )


def read_load(nvml: Nvml, handle: Any) -> GpuLoad:
    """Reads memory use, utilisation, power, temperature and throttling of a GPU. Raises GpuFailed."""
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    milliwatts = nvml.ask("nvmlDeviceGetPowerUsage", handle)
    throttled = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if throttled is None:  # its name in drivers before 535
        throttled = nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return GpuLoad(
        memory_used=memory.used if memory is not None else None,
        utilisation=rates.gpu if rates is not None else None,
        power=round(milliwatts / 1e3) if milliwatts is not None else None,
        temperature=nvml.ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        throttled=throttled,
    )


def read_errors(nvml: Nvml, handle: Any, facts: GpuFacts) -> GpuFacts:
    """Returns `facts` with the current counts of errors, and the fault that they mean. Raises GpuFailed."""
    volatile = nvml.NVML_VOLATILE_ECC
    corrected = nvml.ask("nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile)
    broken = nvml.ask("nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile)
    rows = nvml.ask("nvmlDeviceGetRemappedRows", handle)
    return replace(
        facts,
        pcie_width_now=nvml.ask("nvmlDeviceGetCurrPcieLinkWidth", handle) or 0,
        ecc_corrected=corrected or 0,
        ecc_uncorrectable=broken or 0,
        problem="; ".join(sorted(nvml.problems.values())),
        fault=facts.fault or _fault(broken or 0, bool(rows and rows[3])),
    )


def with_xid(facts: GpuFacts, xid: int) -> GpuFacts:
    """Returns `facts` after one more Xid error."""
    fault = f"Xid {xid}: {FATAL_XIDS[xid]}" if xid in FATAL_XIDS else ""
    return replace(facts, xid=xid, xids=facts.xids + 1, fault=facts.fault or fault)


def _fault(uncorrectable: int, unmapped: bool) -> str:
    if unmapped:
        return "a memory row of the GPU can't be remapped"
    return "the GPU has reported uncorrectable ECC errors" if uncorrectable else ""


def link_bandwidth(generation: int, width: int) -> float:
    """Returns a PCIe link's bytes per second in one direction; 0.0 for an unknown generation."""
    return float(round(TRANSFERS_PER_S.get(generation, 0.0) * PAYLOAD.get(generation, 0.0) * width / 8))
