"""Which NUMA node and which cores are near which GPU, by /sys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from node_agent.gpu.devices import Gpu

SYS = Path("/sys")


def parse_cpulist(text: str) -> set[int]:
    """Returns the cores of a list such as `0-3,8,10-11`. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def numa_node_of(bus: str, sys: Path = SYS) -> int | None:
    """Returns the NUMA node of the device at a PCI address as /sys writes it; None where the host does not say."""
    try:
        node = int((sys / "bus/pci/devices" / bus / "numa_node").read_text()) if bus else -1
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def near_cores(gpu: Gpu, allowed: Collection[int], sys: Path = SYS) -> set[int]:
    """Returns those of the `allowed` cores that are on the GPU's NUMA node; all of them where the host does not say
    which those are, or none of them is allowed."""
    try:
        node = numa_node_of(gpu.bus, sys)
        near = parse_cpulist((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        near = set()
    return near & set(allowed) or set(allowed)


def share_cores(gpus: Sequence[Gpu], allowed: Collection[int], most: int, sys: Path = SYS) -> dict[str, set[int]]:
    """Returns for each GPU, by UUID, cores of its own for its node: an equal part of its NUMA node's, `most` at most.
    Where a NUMA node has fewer cores than GPUs, their nodes share all of its cores.

    `most`: what a node may use of a processor quota, which no list of cores shows.
    """
    shares: dict[str, set[int]] = {}
    near = {gpu.uuid: near_cores(gpu, allowed, sys) for gpu in gpus}
    for gpu in gpus:
        cores = sorted(near[gpu.uuid])
        neighbours = [other.uuid for other in gpus if near[other.uuid] == near[gpu.uuid]]
        part = len(cores) // len(neighbours)
        begin = neighbours.index(gpu.uuid) * part
        shares[gpu.uuid] = set(cores[begin : begin + min(part, most)]) or set(cores)
    return shares
