"""One node per GPU: a node claims its GPU for as long as its supervisor lives, and no other node of the host gets it.

The claim is a listening Unix socket of an abstract name. The kernel ends it with the process, however that ends, it
needs no file and no permission, and whoever finds the name taken can ask whose it is. Nodes in containers with networks
of their own do not see each other's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from node_agent.config import EngineConfig
from node_agent.cores import usable_cores
from node_agent.gpu.devices import VISIBLE, Gpu, NoGpu, list_gpus, usable_gpus
from node_agent.gpu.numa import SYS, share_cores
from node_agent.gpu.nvml import NvmlProblem

NAME = "\0garnish-gpu-"
"""Of a claim, before the GPU's UUID; the first byte makes it abstract."""
ORDER = "CUDA_DEVICE_ORDER"
ASK_S = 1.0
MAX_ASKERS = 128
"""Connections of those who found a GPU taken: nobody accepts them, and later ones are not told whose it is."""

log = logging.getLogger(__name__)


def node_gpus(device: str, devices: Sequence[int] | None, environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Returns the GPUs that nodes of this host may have; none on a host without, where the device is the CPU, and where
    NVML does not work: who watches over the GPUs is away then, they may be there. Raises NoGpu."""
    return usable_gpus(found, devices, environment) if (found := _listed(device)) is not None else []


def _listed(device: str) -> list[Gpu] | None:
    """Returns the host's GPUs; None where no GPU can be claimed: for the CPU, and where NVML does not work."""
    if device == "cpu":
        return None
    try:
        return list_gpus()
    except NvmlProblem as problem:
        log.warning("GPUs can't be listed, and none is claimed", extra={"reason": str(problem)})
        return None


@contextlib.contextmanager
def claimed_gpu(config: EngineConfig, sys: Path = SYS) -> Iterator[EngineConfig]:
    """Yields the settings with the first free GPU of `node_gpus`, which is nobody else's meanwhile. This process, and
    those that it starts, see that GPU alone and stay on cores near it. Without a GPU nothing changes. Raises NoGpu."""
    found = _listed(config.device)
    gpus = usable_gpus(found, config.devices, os.environ) if found is not None else []
    if found is None or not gpus:
        yield config
        return
    gpu, claim = _claim_first(gpus)
    allowed, environment = os.sched_getaffinity(0), dict(os.environ)
    sharing = usable_gpus(found, config.devices, {})  # nodes elsewhere may see others of them
    shares = share_cores(sharing, allowed, max(1, usable_cores() // len(sharing)), sys)
    cores = shares[gpu.uuid]
    host_nodes = sum(1 for others in shares.values() if others & cores)
    with claim:
        log.info("GPU claimed", extra={"gpu": gpu.uuid, "index": gpu.index, "cores": sorted(cores)})
        os.environ |= {VISIBLE: gpu.uuid, ORDER: "PCI_BUS_ID"}
        os.sched_setaffinity(0, cores)
        try:
            yield replace(config, gpu=gpu.uuid, host_nodes=host_nodes)
        finally:
            os.sched_setaffinity(0, allowed)
            for name in (VISIBLE, ORDER):
                os.environ.pop(name, None)
                os.environ |= {name: environment[name]} if name in environment else {}


def _claim_first(gpus: Sequence[Gpu]) -> tuple[Gpu, socket.socket]:
    """Claims the first of these GPUs that no other node has, by a socket that is to be kept open. Raises NoGpu."""
    for gpu in gpus:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(NAME + gpu.uuid)
            claim.listen(MAX_ASKERS)
            return gpu, claim
        except OSError:
            claim.close()
    taken = ", ".join(f"GPU {gpu.index} by process {_holder(gpu) or 'unknown'}" for gpu in gpus)
    raise NoGpu(f"every GPU that a node may have here is another node's: {taken}; a GPU takes one node")


def _holder(gpu: Gpu) -> int | None:
    """Returns the process that has claimed the GPU; None where that can't be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ASK_S)
        try:
            asking.connect(NAME + gpu.uuid)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    return int(struct.unpack("3i", credentials)[0])
