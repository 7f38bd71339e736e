"""`node.devices`: what the file may say, and how many nodes `garnish up` starts for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from garnish.config import ServiceFile, load_service_file
from garnish.errors import ServiceFileError, StartError
from garnish.up import prepare
from garnish.up.prepare import node_count
from node_agent.gpu.devices import Gpu, NoGpu


def written(folder: Path, node: str) -> ServiceFile:
    file = folder / "serverless.yml"
    file.write_text(f"service: s\nbase_model: ./m\nnode: {node}\n")
    return load_service_file(file, {})


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ("{devices: [0, 0]}", "named twice"),
        ("{devices: []}", "devices"),
        ("{devices: [-1]}", "devices"),
        ("{devices: some}", "devices"),
        ("{devices: [0], device: cpu}", "device is cpu"),
    ],
)
def test_devices_that_can_t_be(tmp_path: Path, node: str, problem: str) -> None:
    with pytest.raises(ServiceFileError, match=problem):
        written(tmp_path, node)


@pytest.mark.parametrize(
    ("gpus", "asked", "nodes"), [(0, None, 1), (0, 3, 3), (2, None, 2), (2, 1, 1), (2, 2, 2), (1, None, 1)]
)
def test_a_node_per_gpu_or_as_many_as_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, asked: int | None, nodes: int
) -> None:
    found = [Gpu(index=index, uuid=f"GPU-{index}") for index in range(gpus)]
    monkeypatch.setattr(prepare, "node_gpus", lambda device, devices: found)
    assert node_count(written(tmp_path, "{}"), asked) == nodes


def test_more_nodes_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "node_gpus", lambda device, devices: [Gpu(index=0, uuid="GPU-0")])
    with pytest.raises(StartError, match="--nodes 2: nodes may have 1 GPUs of this host, and a GPU takes one node"):
        node_count(written(tmp_path, "{devices: [0]}"), 2)


def test_gpus_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def node_gpus(device: str, devices: list[int] | None) -> list[Gpu]:
        assert (device, devices) == ("auto", [0, 2])
        raise NoGpu("there is no GPU 2")

    monkeypatch.setattr(prepare, "node_gpus", node_gpus)
    with pytest.raises(StartError, match="there is no GPU 2"):
        node_count(written(tmp_path, "{devices: [0, 2]}"), None)
