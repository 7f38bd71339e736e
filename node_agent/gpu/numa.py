"""The NUMA node and the cores that are near a GPU, by /sys: for CPU LoRA workers, and memory that they share.

Memory is put there by libnuma, where that is installed and allowed; elsewhere by first touch from a core that is near.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from node_agent.gpu.devices import Gpu, find_gpu

LIBRARY = "libnuma.so.1"
SYS = Path("/sys")


def home_node(uuid: str, allowed: Collection[int], sys: Path = SYS) -> int | None:
    """Returns the NUMA node of the GPU; that of the first `allowed` core for a node without one (`uuid` is empty), and
    where the GPU's is not known. Returns None where the host does not say."""
    gpu = find_gpu(uuid)
    node = numa_node_of(gpu.bus, sys) if gpu is not None else None
    return node if node is not None else _node_of(min(allowed), sys)


def nearest_first(cores: Collection[int], node: int | None, sys: Path = SYS) -> list[int]:
    """Returns the cores by how far their memory is from the NUMA node, and then by number."""
    distances = _distances(node, sys)
    return sorted(cores, key=lambda core: (distances.get(core, 0), core))


@contextmanager
def memory_near(node: int | None, allowed: Collection[int], sys: Path = SYS) -> Iterator[None]:
    """Has what this thread allocates and touches meanwhile lie on the NUMA node, as long as that has room. With None,
    and where no `allowed` core is on it and libnuma can't be used, it lies where it would anyway."""
    library = _libnuma() if node is not None else None
    if library is not None:
        library.numa_set_preferred(node)
        try:
            yield
        finally:
            library.numa_set_localalloc()
        return
    before, near = os.sched_getaffinity(0), set(allowed) & (_nodes(sys).get(node, set()) if node is not None else set())
    os.sched_setaffinity(0, near or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _nodes(sys: Path) -> dict[int, set[int]]:
    """Returns the cores of each NUMA node, some of which have none; nothing where the host does not say."""
    found = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        try:
            found[int(folder.name.removeprefix("node"))] = parse_cpulist((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return found


def _node_of(core: int, sys: Path) -> int | None:
    return next((node for node, cores in _nodes(sys).items() if core in cores), None)


def _distances(node: int | None, sys: Path) -> dict[int, int]:
    """Returns for each core how far its memory is from the NUMA node: as the firmware says, else 1 where it is on
    another; nothing where the host does not say."""
    nodes = dict(sorted(_nodes(sys).items()))
    try:
        of_nodes = list(map(int, (sys / f"devices/system/node/node{node}/distance").read_text().split()))
    except (OSError, ValueError):
        of_nodes = []
    if len(of_nodes) != len(nodes):
        of_nodes = [int(number != node) for number in nodes]
    return {core: far for cores, far in zip(nodes.values(), of_nodes, strict=True) for core in cores}


def _libnuma() -> ctypes.CDLL | None:
    """Returns libnuma; None where it is not installed, or a container forbids what it does."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.numa_available() >= 0 else None


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
