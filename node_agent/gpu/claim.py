"""Claims GPUs for a node while the node's supervisor lives, so that each GPU has at most one node of the host.

The claim is a listening Unix socket with an abstract name. It needs no file and no permission, and the kernel closes it
when the process ends for any reason. A process that can't bind the name can ask which process has it. Containers with
separate networks do not see each other's claims.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from node_agent.config import EngineConfig
from node_agent.cores import usable_cores
from node_agent.gpu.devices import VISIBLE, Gpu, NoGpu, list_gpus, usable_gpus
from node_agent.gpu.numa import SYS, share_cores
from node_agent.gpu.nvml import NvmlProblem
from node_agent.vllm.arguments import host_gpus

NAME = "\0garnish-gpu-"
"""Prefix of a claim's name, before the GPU's UUID; the first byte makes the name abstract."""
ORDER = "CUDA_DEVICE_ORDER"
ASK_S = 1.0
MAX_ASKERS = 128
"""Maximum pending connections to a claim's socket, which accepts none. Once they are reached, further processes can't
find out who has the claim."""

log = logging.getLogger(__name__)


def node_gpus(device: str, devices: Sequence[int] | None, environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Returns the GPUs that nodes of this host may use. Raises NoGpu.

    The list is empty if the device is the CPU, on a host without a GPU, and if NVML does not work.
    """
    return usable_gpus(gpus, devices, environment) if (gpus := _listed(device)) is not None else []


def _listed(device: str) -> list[Gpu] | None:
    """Returns the host's GPUs; None if no GPU can be claimed: for the CPU, and if NVML does not work."""
    if device == "cpu":
        return None
    try:
        return list_gpus()
    except NvmlProblem as problem:
        log.warning("GPUs can't be listed, and none is claimed", extra={"reason": str(problem)})
        return None


@contextlib.contextmanager
def claimed_gpus(config: EngineConfig, sys: Path = SYS) -> Iterator[EngineConfig]:
    """Claims the first free GPUs of `node_gpus` while the context lasts, as many as the node's engine needs. Yields the
    settings with the first one. Raises NoGpu.

    This process, and those that it starts, see these GPUs alone and run on cores near them. Without a GPU the settings
    are not changed.
    """
    listed = _listed(config.device)
    gpus = usable_gpus(listed, config.devices, os.environ) if listed is not None else []
    if listed is None or not gpus:
        yield config
        return
    count = needed_gpus(config.engine, config.vllm.arguments)
    claimed, claims = _claim(gpus, count)
    allowed, environment = os.sched_getaffinity(0), dict(os.environ)
    sharing = usable_gpus(listed, config.devices, {})  # nodes of other environments may see other GPUs
    shares = share_cores(sharing, allowed, max(1, usable_cores() // len(sharing)), sys)
    cores = set[int]().union(*(shares[gpu.uuid] for gpu in claimed))
    host_nodes = max(1, sum(1 for share in shares.values() if share & cores) // count)
    uuids = [gpu.uuid for gpu in claimed]
    with claims:
        log.info("GPUs claimed", extra={"gpus": uuids, "cores": sorted(cores)})
        os.environ |= {VISIBLE: ",".join(uuids), ORDER: "PCI_BUS_ID"}
        os.sched_setaffinity(0, cores)
        try:
            yield replace(config, gpu=uuids[0], host_nodes=host_nodes)
        finally:
            os.sched_setaffinity(0, allowed)
            for name in (VISIBLE, ORDER):
                os.environ.pop(name, None)
                os.environ |= {name: environment[name]} if name in environment else {}


def needed_gpus(engine: str, arguments: dict[str, Any]) -> int:
    """Returns the number of GPUs of a node with this engine. `arguments`: those of vLLM."""
    return host_gpus(arguments) if engine == "vllm" else 1


def _claim(gpus: Sequence[Gpu], count: int) -> tuple[list[Gpu], contextlib.ExitStack]:
    """Claims the first `count` of these GPUs that no node has claimed. Returns them, and the claims as a context, which
    must stay open. Raises NoGpu."""
    with contextlib.ExitStack() as claims:
        claimed: list[Gpu] = []
        for gpu in gpus:
            if len(claimed) == count:
                break
            claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                claim.bind(NAME + gpu.uuid)
                claim.listen(MAX_ASKERS)
            except OSError:
                continue
            claimed.append(gpu)
        if len(claimed) == count:
            return claimed, claims.pop_all()
        missing = [gpu for gpu in gpus if gpu not in claimed]
        holders = ", ".join(f"GPU {gpu.index} by process {_holder(gpu) or 'unknown'}" for gpu in missing)
    if count == 1:
        raise NoGpu(f"all allowed GPUs are used by other nodes: {holders}; a GPU serves one node")
    rest = f"; other nodes have {holders}" if holders else ""
    raise NoGpu(f"the node needs {count} GPUs, and may have {len(claimed)} of this host{rest}")


def _holder(gpu: Gpu) -> int | None:
    """Returns the id of the process that has claimed the GPU; None if the socket can't be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ASK_S)
        try:
            asking.connect(NAME + gpu.uuid)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    return int(struct.unpack("3i", credentials)[0])
