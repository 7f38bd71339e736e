"""Finds the NUMA node and the cores near a GPU, by /sys, and allocates memory there.

Memory is placed by libnuma, if that is installed and allowed, else by first touch from a core of the node.
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
    """Returns the NUMA node of a GPU, or else of the first `allowed` core; None if /sys has neither.

    `uuid` is empty on a node without a GPU.
    """
    gpu = find_gpu(uuid)
    node = numa_node_of(gpu.bus, sys) if gpu is not None else None
    return node if node is not None else _node_of(min(allowed), sys)


def nearest_first(cores: Collection[int], node: int | None, sys: Path = SYS) -> list[int]:
    """Returns the cores in order of the distance between their memory and the NUMA node, then of their number."""
    distances = _distances(node, sys)
    return sorted(cores, key=lambda core: (distances.get(core, 0), core))


@contextmanager
def memory_near(node: int | None, allowed: Collection[int], sys: Path = SYS) -> Iterator[None]:
    """Context in which memory that this thread allocates and touches is placed on the NUMA node, while the node has
    room.

    Placement does not change if `node` is None, or if libnuma can't be used and no `allowed` core is on the node.
    """
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
    """Returns the cores of each NUMA node, which may have none; empty if /sys has no NUMA nodes."""
    cores_by_node = {}
    for folder in (sys / "devices/system/node").glob("node[0-9]*"):
        try:
            cores_by_node[int(folder.name.removeprefix("node"))] = parse_cpulist((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return cores_by_node


def _node_of(core: int, sys: Path) -> int | None:
    return next((node for node, cores in _nodes(sys).items() if core in cores), None)


def _distances(node: int | None, sys: Path) -> dict[int, int]:
    """Returns the distance between each core's memory and the NUMA node, as the firmware gives it.

    Without firmware distances it is 0 on the same node and 1 on another. Empty if /sys has no NUMA nodes.
    """
    nodes = dict(sorted(_nodes(sys).items()))
    try:
        of_nodes = list(map(int, (sys / f"devices/system/node/node{node}/distance").read_text().split()))
    except (OSError, ValueError):
        of_nodes = []
    if len(of_nodes) != len(nodes):
        of_nodes = [int(number != node) for number in nodes]
    return {core: far for cores, far in zip(nodes.values(), of_nodes, strict=True) for core in cores}


def _libnuma() -> ctypes.CDLL | None:
    """Returns libnuma; None if it is not installed, or a container forbids its system calls."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.numa_available() >= 0 else None


def parse_cpulist(text: str) -> set[int]:
    """Parses a list of cores such as `0-3,8,10-11`. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def numa_node_of(bus: str, sys: Path = SYS) -> int | None:
    """Returns the NUMA node of the device at a PCI address of /sys; None if /sys does not have it."""
    try:
        node = int((sys / "bus/pci/devices" / bus / "numa_node").read_text()) if bus else -1
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def near_cores(gpu: Gpu, allowed: Collection[int], sys: Path = SYS) -> set[int]:
    """Returns the `allowed` cores on the GPU's NUMA node. Returns all `allowed` cores if none is there, or /sys has no
    node."""
    try:
        node = numa_node_of(gpu.bus, sys)
        near = parse_cpulist((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        near = set()
    return near & set(allowed) or set(allowed)


def share_cores(gpus: Sequence[Gpu], allowed: Collection[int], max_cores: int, sys: Path = SYS) -> dict[str, set[int]]:
    """Returns cores for the node of each GPU, by UUID: an equal share of its NUMA node's cores, at most `max_cores`.

    GPUs of a NUMA node that has fewer cores than GPUs share all of its cores. `max_cores` is a node's part of the
    processor quota, which no list of cores shows.
    """
    shares: dict[str, set[int]] = {}
    near = {gpu.uuid: near_cores(gpu, allowed, sys) for gpu in gpus}
    for gpu in gpus:
        cores = sorted(near[gpu.uuid])
        neighbours = [peer.uuid for peer in gpus if near[peer.uuid] == near[gpu.uuid]]
        part = len(cores) // len(neighbours)
        begin = neighbours.index(gpu.uuid) * part
        shares[gpu.uuid] = set(cores[begin : begin + min(part, max_cores)]) or set(cores)
    return shares
