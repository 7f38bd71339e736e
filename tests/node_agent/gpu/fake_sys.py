"""A /sys of a host's NUMA nodes and GPUs."""

from __future__ import annotations

from pathlib import Path

from node_agent.gpu.devices import Gpu


def gpu(number: int) -> Gpu:
    return Gpu(index=number, uuid=f"GPU-{number}", bus=f"0000:{number:02x}:00.0")


def make_sys(folder: Path, numa: dict[int, str], of_gpus: dict[int, int], far: dict[int, str] | None = None) -> Path:
    """`numa`: lists of cores by NUMA node; `of_gpus`: NUMA nodes by GPU; `far`: distances to all nodes, by node."""
    for node, cores in numa.items():
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
        (folder / f"devices/system/node/node{node}/cpulist").write_text(cores + "\n")
    for node, distances in (far or {}).items():
        (folder / f"devices/system/node/node{node}/distance").write_text(distances + "\n")
    for number, node in of_gpus.items():
        (folder / "bus/pci/devices" / gpu(number).bus).mkdir(parents=True)
        (folder / "bus/pci/devices" / gpu(number).bus / "numa_node").write_text(f"{node}\n")
    return folder
