"""One node per GPU, whoever starts nodes: over the fake NVML, with real processes where it is about them."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from node_agent.config import EngineConfig, VllmConfig
from node_agent.gpu import claim as claims
from node_agent.gpu.claim import claimed_gpus, node_gpus
from node_agent.gpu.devices import NoGpu, expected_link, list_gpus
from node_agent.gpu.nvml import NvmlProblem
from tests.node_agent.gpu.conftest import MakeNvml
from tests.node_agent.gpu.fake_nvml import FakeNvml

CONFIG = EngineConfig(model_dir="", base_id="b", registry="", host_nodes=3)


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Claims are the whole host's, and other tests may run on it."""
    monkeypatch.setattr(claims, "NAME", f"\0garnish-test-{uuid.uuid4()}-")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def three(make_nvml: MakeNvml) -> FakeNvml:
    fake = make_nvml()
    fake.set("nvmlDeviceGetCount_v2", value=3)
    return fake


def test_each_node_gets_a_gpu_and_no_gpu_gets_two(three: FakeNvml) -> None:
    cores = os.sched_getaffinity(0)
    with ExitStack() as nodes:
        for number in range(3):
            assert nodes.enter_context(claimed_gpus(CONFIG)).gpu == f"GPU-{number}"
            assert os.environ.pop("CUDA_VISIBLE_DEVICES") == f"GPU-{number}"  # as a node started elsewhere
            assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        with pytest.raises(NoGpu, match=f"GPU 1 by process {os.getpid()}"), claimed_gpus(CONFIG):
            pass
    assert os.sched_getaffinity(0) == cores and "CUDA_VISIBLE_DEVICES" not in os.environ
    with claimed_gpus(CONFIG) as again:
        assert again.gpu == "GPU-0"


def sharded(size: int) -> EngineConfig:
    arguments = {"tensor_parallel_size": size}
    return replace(CONFIG, engine="vllm", vllm=VllmConfig(arguments=arguments))


def test_a_sharded_node_gets_all_its_gpus_or_none(three: FakeNvml) -> None:
    cores = os.sched_getaffinity(0)
    with claimed_gpus(sharded(2)) as config:
        assert config.gpu == "GPU-0"
        assert os.environ.pop("CUDA_VISIBLE_DEVICES") == "GPU-0,GPU-1"
        refused = f"needs 2 GPUs, and may have 1 of this host; other nodes have GPU 0 by process {os.getpid()}, GPU 1"
        with pytest.raises(NoGpu, match=refused), claimed_gpus(sharded(2)):
            pass
        with claimed_gpus(CONFIG) as single:
            assert single.gpu == "GPU-2", "the refused node has left it free"
    assert os.sched_getaffinity(0) == cores
    with pytest.raises(NoGpu, match=r"needs 4 GPUs, and may have 3 of this host$"), claimed_gpus(sharded(4)):
        pass
    with claimed_gpus(replace(sharded(2), engine="garnish")):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"


def test_a_claim_ends_with_its_process(three: FakeNvml) -> None:
    """By kill -9."""
    hold = (
        "import socket, sys\n"
        "claim = socket.socket(socket.AF_UNIX)\n"
        "claim.bind('\\0' + sys.argv[1]); claim.listen(1); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, (claims.NAME + "GPU-0")[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with claimed_gpus(CONFIG) as config:
            assert config.gpu == "GPU-1"
        only = EngineConfig(model_dir="", base_id="b", registry="", devices=(0,))
        with pytest.raises(NoGpu, match=f"GPU 0 by process {other.pid}; a GPU serves one node"), claimed_gpus(only):
            pass
        other.kill()
        other.wait()
        with claimed_gpus(only) as config:
            assert config.gpu == "GPU-0"


def test_cores_near_the_gpu_are_the_node_s(three: FakeNvml, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    (tmp_path / "devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "devices/system/node/node1/cpulist").write_text(str(cores[-1]))
    (tmp_path / "bus/pci/devices/0000:10:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:10:00.0/numa_node").write_text("1")
    only = EngineConfig(model_dir="", base_id="b", registry="", devices=(0,), host_nodes=5)
    with claimed_gpus(only, tmp_path) as config:
        assert os.sched_getaffinity(0) == {cores[-1]} and config.host_nodes == 1


@pytest.mark.parametrize(
    ("devices", "visible", "indices"),
    [
        (None, None, [0, 1, 2]),
        ((2, 0), None, [0, 2]),
        (None, "2,1", [1, 2]),
        ((0, 1), "1", [1]),
        (None, "GPU-1", [1]),
        (None, "", []),
        (None, "MIG-1234", []),
        (None, "0,-1,1", [0]),
        (None, "0,7,1", [0]),
        (None, "GPU-2,,1", [2]),
    ],
)
def test_which_gpus_nodes_may_have(
    three: FakeNvml, devices: tuple[int, ...] | None, visible: str | None, indices: list[int]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = node_gpus("auto", devices, environment)
    assert [gpu.index for gpu in found] == indices
    assert [gpu.bus for gpu in found] == [f"0000:1{index}:00.0" for index in indices]
    assert node_gpus("cpu", devices, environment) == []


def test_a_gpu_that_is_not_there_is_named(three: FakeNvml) -> None:
    with pytest.raises(NoGpu, match=r"there is no GPU 3 on this host; it has 3"):
        node_gpus("auto", (0, 3))


def test_a_gpu_that_has_failed_is_passed_over(three: FakeNvml) -> None:
    three.set("nvmlDeviceGetHandleByIndex_v2", value=0b101)
    with claimed_gpus(CONFIG) as config:
        assert config.gpu == "GPU-1"
    three.set("nvmlDeviceGetHandleByIndex_v2", value=0b111)
    with pytest.raises(NoGpu, match="GPU 2 can't be used: it is lost"), claimed_gpus(CONFIG):
        pass


def test_a_gpu_that_this_process_may_not_use_is_passed_over(three: FakeNvml) -> None:
    """As where a container or a batch system gives it some of the host's GPUs: NVML counts all."""
    three.set("nvmlDeviceGetHandleByIndex_v2", value=0b101 << 32)
    with claimed_gpus(CONFIG) as config:
        assert config.gpu == "GPU-1"
    with pytest.raises(NoGpu, match="GPU 2 can't be used: it can't be read"):
        node_gpus("auto", (2,))


def test_uncorrectable_errors_pass_over_a_gpu_too(three: FakeNvml) -> None:
    three.set("nvmlDeviceGetTotalEccErrors", value=1 << 32)
    with pytest.raises(NoGpu, match="uncorrectable"):
        node_gpus("auto", None)


@pytest.mark.parametrize("name", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID"])
def test_nvml_that_fails_keeps_no_node_from_starting(
    three: FakeNvml, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    three.set(name, code=999)
    with claimed_gpus(CONFIG) as config:
        assert config is CONFIG
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_nvml_that_hangs_is_given_up(three: FakeNvml) -> None:
    three.set("nvmlInitWithFlags", hangs=True)
    with pytest.raises(NvmlProblem, match="has not answered"):
        list_gpus(0.05)


def test_what_the_link_to_a_gpu_should_carry(three: FakeNvml) -> None:
    assert expected_link("GPU-1") is None, "NVML does not say"
    three.set("nvmlDeviceGetMaxPcieLinkGeneration", value=5)
    three.set("nvmlDeviceGetMaxPcieLinkWidth", value=8)
    assert expected_link("GPU-1") == 31_507_692_308.0
    assert expected_link("") is None and expected_link("GPU-7") is None
    three.set("nvmlInitWithFlags", code=999)
    assert expected_link("GPU-1") is None


def test_a_host_without_nvml_has_cpu_nodes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with claimed_gpus(CONFIG) as config:
        assert config is CONFIG
    assert not caplog.records
    with pytest.raises(NoGpu, match=r"there is no GPU 1 on this host; it has 0"):
        node_gpus("auto", (1,))
