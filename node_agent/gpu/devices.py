"""The GPUs of this host, and which of them nodes may have."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from node_agent.gpu.nvml import GpuFailed, Nvml, NvmlProblem, load_nvml
from node_agent.gpu.reading import read_errors, read_identity

LONGEST_LIST_S = 30.0
"""A driver that is loaded by the first call takes seconds for each GPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as NVML counts it. One that has failed may have no `uuid` and no `bus` any more."""

    index: int
    uuid: str = ""
    name: str = ""
    bus: str = ""
    """Its PCI address as /sys writes it, such as 0000:17:00.0."""
    link: float = 0.0
    """Bytes per second that the PCIe link to it carries; 0: not known."""
    fault: str = ""
    """Why it can't be used; empty: it can."""


class NoGpu(Exception):
    """A node can't have the GPUs that it was to have; the message says why."""


def list_gpus(seconds: float = LONGEST_LIST_S) -> list[Gpu]:
    """Returns the host's GPUs; none without NVML. Raises NvmlProblem when NVML can't be used, or does not answer within
    so many seconds: the thread that waits for it is left behind then."""
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
    found = listed[0]
    if isinstance(found, NvmlProblem):
        raise found
    return found


def find_gpu(uuid: str) -> Gpu | None:
    """Returns the GPU; None for a node without one (`uuid` is empty), and where NVML does not say."""
    try:
        return next((gpu for gpu in list_gpus() if gpu.uuid == uuid), None) if uuid else None
    except NvmlProblem:
        return None


def expected_link(uuid: str) -> float | None:
    """Returns the bytes per second that the PCIe link to a GPU carries; None where that is not known."""
    gpu = find_gpu(uuid)
    return (gpu.link or None) if gpu is not None else None


def usable_gpus(gpus: Sequence[Gpu], devices: Sequence[int] | None, environment: Mapping[str, str]) -> list[Gpu]:
    """Returns the GPUs that nodes may have: of `devices` (None: all), as far as CUDA_VISIBLE_DEVICES lets this process
    see them, without those that have failed. Raises NoGpu for a device that is not there, and where all have failed."""
    known = {gpu.index: gpu for gpu in gpus}
    missing = [index for index in devices or () if index not in known]
    if missing:
        raise NoGpu(f"node.devices: there is no GPU {missing[0]} on this host; it has {len(gpus)}")
    allowed = [gpu for gpu in gpus if devices is None or gpu.index in devices]
    seen = _visible(gpus, environment.get(VISIBLE))
    allowed = [gpu for gpu in allowed if gpu.index in seen]
    usable = [gpu for gpu in allowed if not gpu.fault]
    if allowed and not usable:
        raise NoGpu("; ".join(f"GPU {gpu.index} can't be used: {gpu.fault}" for gpu in allowed))
    return usable


def _visible(gpus: Sequence[Gpu], visible: str | None) -> set[int]:
    """Returns the indices of the GPUs that CUDA shows: as it does, none of those behind the first entry that does not
    name one. It counts as NVML does only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which a node's processes get."""
    if visible is None:
        return {gpu.index for gpu in gpus}
    seen = set[int]()
    for entry in map(str.strip, visible.split(",")):
        named = {gpu.index for gpu in gpus if entry == str(gpu.index) or _is_uuid_of(gpu, entry)}
        if len(named) != 1:
            break
        seen |= named
    return seen


def _is_uuid_of(gpu: Gpu, entry: str) -> bool:
    """Returns whether the entry is the GPU's UUID, or its beginning."""
    return entry.startswith("GPU-") and gpu.uuid.startswith(entry)


def _list() -> list[Gpu]:
    """Returns the host's GPUs. Raises NvmlProblem, also where no GPU can be read."""
    library = load_nvml()
    if library is None:
        return []
    nvml = Nvml(library)
    try:
        found = [_look(nvml, index) for index in range(nvml.call("nvmlDeviceGetCount"))]
    except GpuFailed as failure:
        raise NvmlProblem(str(failure)) from failure
    finally:
        with suppress(GpuFailed):
            nvml.ask("nvmlShutdown")
    problems = [each for each in found if isinstance(each, NvmlProblem)]
    if problems and len(problems) == len(found):
        raise problems[0]
    return [
        each if isinstance(each, Gpu) else Gpu(index=index, fault=f"it can't be read ({each})")
        for index, each in enumerate(found)
    ]


def _look(nvml: Nvml, index: int) -> Gpu | NvmlProblem:
    """Returns the GPU, or why it can't be read: NVML counts also those that this process may not use."""
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
