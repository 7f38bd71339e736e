"""Lists the GPUs of this host, and those of them that nodes may use."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from node_agent.gpu.nvml import GpuFailed, Nvml, NvmlProblem, load_nvml
from node_agent.gpu.reading import read_errors, read_identity

MAX_LIST_S = 30.0
"""Maximum seconds for listing the GPUs. The first call may load the driver, which takes seconds per GPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU by its NVML index. A failed one may have no `uuid` and no `bus`."""

    index: int
    uuid: str = ""
    name: str = ""
    bus: str = ""
    """PCI address as in /sys, such as 0000:17:00.0"""
    link: float = 0.0
    """bytes per second of its PCIe link; 0: unknown"""
    fault: str = ""
    """reason why the GPU can't be used; empty if it can"""


class NoGpu(Exception):
    """A node can't have the requested GPUs, for the reason in the message."""


def list_gpus(seconds: float = MAX_LIST_S) -> list[Gpu]:
    """Returns the host's GPUs; an empty list without NVML. Raises NvmlProblem if NVML can't be used, or if it takes
    longer than `seconds`. A thread that then still waits for NVML is abandoned."""
    listed: list[list[Gpu] | NvmlProblem] = []

    def work() -> None:
        try:
            listed.append(_list())
        except NvmlProblem as problem:
            listed.append(problem)

    thread = threading.Thread(target=work, name="gpu-list", daemon=True)
    thread.start()
    thread.join(seconds)
    if not listed:
        raise NvmlProblem(f"NVML has not answered for {seconds:g} s")
    outcome = listed[0]
    if isinstance(outcome, NvmlProblem):
        raise outcome
    return outcome


def find_gpu(uuid: str) -> Gpu | None:
    """Returns the GPU with this UUID; None if `uuid` is empty, or if NVML does not list it."""
    try:
        return next((gpu for gpu in list_gpus() if gpu.uuid == uuid), None) if uuid else None
    except NvmlProblem:
        return None


def expected_link(uuid: str) -> float | None:
    """Returns the bytes per second of a GPU's PCIe link; None if that is unknown."""
    gpu = find_gpu(uuid)
    return (gpu.link or None) if gpu is not None else None


def usable_gpus(gpus: Sequence[Gpu], devices: Sequence[int] | None, environment: Mapping[str, str]) -> list[Gpu]:
    """Returns those GPUs of `devices` (None: all) that CUDA_VISIBLE_DEVICES shows and that have not failed.

    Raises NoGpu for a device that is missing on the host, and if all have failed.
    """
    by_index = {gpu.index: gpu for gpu in gpus}
    missing = [index for index in devices or () if index not in by_index]
    if missing:
        raise NoGpu(f"node.devices: there is no GPU {missing[0]} on this host; it has {len(gpus)}")
    allowed = [gpu for gpu in gpus if devices is None or gpu.index in devices]
    visible = _visible(gpus, environment.get(VISIBLE))
    allowed = [gpu for gpu in allowed if gpu.index in visible]
    usable = [gpu for gpu in allowed if not gpu.fault]
    if allowed and not usable:
        raise NoGpu("; ".join(f"GPU {gpu.index} can't be used: {gpu.fault}" for gpu in allowed))
    return usable


def _visible(gpus: Sequence[Gpu], visible: str | None) -> set[int]:
    """Returns the indices of the GPUs that CUDA would show.

    As in CUDA, the first entry that names no GPU ends the list. CUDA's indices are NVML's only under
    CUDA_DEVICE_ORDER=PCI_BUS_ID, which is set for a node's processes.
    """
    if visible is None:
        return {gpu.index for gpu in gpus}
    indices = set[int]()
    for entry in map(str.strip, visible.split(",")):
        matches = {gpu.index for gpu in gpus if entry == str(gpu.index) or _is_uuid_of(gpu, entry)}
        if len(matches) != 1:
            break
        indices |= matches
    return indices


def _is_uuid_of(gpu: Gpu, entry: str) -> bool:
    """Returns True if the entry is the GPU's UUID, or a prefix of it."""
    return entry.startswith("GPU-") and gpu.uuid.startswith(entry)


def _list() -> list[Gpu]:
    """Returns the host's GPUs. Raises NvmlProblem, also if no GPU can be read."""
    library = load_nvml()
    if library is None:
        return []
    nvml = Nvml(library)
    try:
        results = [_read_gpu(nvml, index) for index in range(nvml.call("nvmlDeviceGetCount"))]
    except GpuFailed as failure:
        raise NvmlProblem(str(failure)) from failure
    finally:
        with suppress(GpuFailed):
            nvml.ask("nvmlShutdown")
    problems = [each for each in results if isinstance(each, NvmlProblem)]
    if problems and len(problems) == len(results):
        raise problems[0]
    return [
        each if isinstance(each, Gpu) else Gpu(index=index, fault=f"it can't be read ({each})")
        for index, each in enumerate(results)
    ]


def _read_gpu(nvml: Nvml, index: int) -> Gpu | NvmlProblem:
    """Returns the GPU, or why it can't be read: NVML also counts GPUs that this process may not use."""
    gpu = Gpu(index=index)
    try:
        handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
        gpu = Gpu(index=index, uuid=nvml.call("nvmlDeviceGetUUID", handle))
        pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
        facts = read_errors(nvml, handle, read_identity(nvml, handle, gpu.uuid))
        bus = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci is not None else ""
        return Gpu(index=index, uuid=gpu.uuid, name=facts.name, bus=bus, link=facts.link, fault=facts.fault)
    except GpuFailed as failure:
        return msgspec.structs.replace(gpu, fault=f"it is lost ({failure})")
    except NvmlProblem as problem:
        return problem
