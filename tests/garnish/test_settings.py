"""From the service file to the settings of gateway and nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from garnish.config import ServiceFile, load_service_file
from garnish.errors import ServiceFileError, StartError
from garnish.settings import Base, gateway_config, node_config, resolve_base, run_directory
from garnish.up import prepare
from garnish.up.prepare import node_count
from node_agent.config import DiskCacheConfig, VllmConfig
from node_agent.gpu.devices import Gpu, NoGpu


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path / "base", "base")


def load(folder: Path, text: str) -> ServiceFile:
    file = folder / "serverless.yml"
    file.write_text("service: s\nbase_model: ./base\n" + text)
    return load_service_file(file, {})


def test_gateway(tmp_path: Path, base: Base) -> None:
    service = load(tmp_path, "gateway: {host: 127.0.0.2, port: 81, secret_file: ./secret}\nregistry: ./store\n")
    config = gateway_config(service, base, tmp_path / "state", port=82)
    assert (config.host, config.port, config.base_id) == ("127.0.0.2", 82, "base")
    assert (config.secret_file, config.registry) == (str(tmp_path / "secret"), str(tmp_path / "store"))
    assert config.tmp_dir == str(tmp_path / "state" / "uploads")
    assert config.allowed_sources == ()


def test_how_long_calls_wait_for_a_first_node(tmp_path: Path, base: Base) -> None:
    assert gateway_config(load(tmp_path, ""), base, tmp_path).hold_seconds == 60.0
    assert gateway_config(load(tmp_path, "gateway: {hold: 90s}\n"), base, tmp_path).hold_seconds == 90.0
    with pytest.raises(ServiceFileError, match="hold_seconds: must be 0 to max_timeout"):
        gateway_config(load(tmp_path, "gateway: {hold: 2h}\n"), base, tmp_path)


def test_allowed_sources(tmp_path: Path, base: Base) -> None:
    service = load(tmp_path, "gateway: {allowed_sources: ['s3://acme-training/']}\n")
    assert gateway_config(service, base, tmp_path).allowed_sources == ("s3://acme-training/",)


def test_defaults_lie_in_the_state(tmp_path: Path, base: Base) -> None:
    state = tmp_path / "state"
    config = gateway_config(load(tmp_path, ""), base, state)
    assert (config.secret_file, config.registry) == (str(state / "cluster.secret"), str(state / "registry"))


def test_a_registry_on_s3_is_no_path(tmp_path: Path, base: Base) -> None:
    service = load(tmp_path, "registry: s3://acme-adapters/prod\n")
    assert gateway_config(service, base, tmp_path).registry == "s3://acme-adapters/prod"
    node = node_config(service, base, tmp_path, node_id="n", gateway_url="http://g")
    assert node.engine.registry == "s3://acme-adapters/prod"


def test_no_keys_only_on_loopback(tmp_path: Path, base: Base) -> None:
    service = load(tmp_path, "auth: none\n")
    assert gateway_config(service, base, tmp_path).auth == "none"
    with pytest.raises(ServiceFileError, match="loopback"):
        gateway_config(service, base, tmp_path, host="0.0.0.0")


def test_node(tmp_path: Path, base: Base) -> None:
    simulate = "{link: 3MB/s, worker_repeats: 5}"
    text = (
        "node: {device: cpu, dtype: float16, adapter_memory: 1MiB, kv_memory: 2MiB, eviction: lfu, lora_kernel: bgmv, "
        f"max_rows: 8, chunk_tokens: 64, simulate: {simulate}}}\n"
    )
    config = node_config(load(tmp_path, text), base, tmp_path, node_id="n", gateway_url="http://g", pool="here")
    assert config.pool == "here"
    engine = config.engine
    assert (engine.device, engine.dtype, engine.adapter_memory, engine.kv_memory) == (
        "cpu",
        "float16",
        1 << 20,
        2 << 20,
    )
    assert engine.load_link is not None
    assert (engine.load_link.bandwidth, engine.store_link) == (3e6, None)
    assert (engine.worker_repeats, engine.eviction, engine.lora_kernel) == (5, "lfu", "bgmv")
    assert (engine.max_rows, engine.chunk_tokens, engine.max_cold) == (8, 64, 0), "0: by the device"
    assert (config.secret_file, config.gateway_url) == (str(tmp_path / "cluster.secret"), "http://g")


@pytest.mark.parametrize(
    ("text", "path", "size"),
    [
        ("", None, 0),
        ("node: {disk_cache: off}\n", None, 0),
        ("node: {disk_cache: {bytes: 2MiB}}\n", "state/cache/n", 2 << 20),
        ("node: {disk_cache: {path: fast}}\n", "fast/n", 10 << 30),
    ],
)
def test_disk_cache(tmp_path: Path, base: Base, text: str, path: str | None, size: int) -> None:
    """Off for a registry in a directory; each node has a folder of its own."""
    config = node_config(load(tmp_path, text), base, tmp_path / "state", node_id="n", gateway_url="http://g")
    expected = None if path is None else DiskCacheConfig(str(tmp_path / path), size)
    assert config.engine.disk_cache == expected


def test_a_deep_state_has_its_sockets_elsewhere() -> None:
    assert run_directory(Path("/srv/state"), "n") == Path("/srv/state/run/n")
    deep = Path("/" + "deep/" * 30)
    assert len(str(run_directory(deep, "n"))) < 90
    assert run_directory(deep, "n") != run_directory(deep, "m")


def test_base_model_directory(tmp_path: Path, stories_dir: Path) -> None:
    service = load(tmp_path, "")
    with pytest.raises(StartError, match="make demo-model"):
        resolve_base(service)
    (tmp_path / "base").mkdir()
    with pytest.raises(StartError, match=r"no config.json"):
        resolve_base(service)
    (tmp_path / "base").rmdir()
    (tmp_path / "base").symlink_to(stories_dir)
    assert resolve_base(service) == Base(tmp_path / "base", "stories260K")


def test_hugging_face_id_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that nothing listens for stands for the network being away."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "serverless.yml"
    file.write_text("service: s\nbase_model: acme/nothing\n")
    with pytest.raises(StartError, match="acme/nothing can't be fetched from Hugging Face"):
        resolve_base(load_service_file(file))


SHARDED = "{engine: vllm, vllm: {tensor_parallel_size: 2}}"


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


@pytest.mark.parametrize(("gpus", "asked", "nodes"), [(4, None, 2), (5, None, 2), (4, 2, 2), (0, None, 1), (0, 3, 3)])
def test_a_node_of_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, asked: int | None, nodes: int
) -> None:
    found = [Gpu(index=index, uuid=f"GPU-{index}") for index in range(gpus)]
    monkeypatch.setattr(prepare, "node_gpus", lambda device, devices: found)
    assert node_count(written(tmp_path, SHARDED), asked) == nodes


@pytest.mark.parametrize(
    ("gpus", "asked", "said"),
    [(1, None, "a node needs 2 GPUs, and nodes may have 1 GPUs"), (3, 2, "--nodes 2: .* 3 GPUs .* a node needs 2")],
)
def test_too_few_gpus_for_a_node_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, asked: int | None, said: str
) -> None:
    found = [Gpu(index=index, uuid=f"GPU-{index}") for index in range(gpus)]
    monkeypatch.setattr(prepare, "node_gpus", lambda device, devices: found)
    with pytest.raises(StartError, match=said):
        node_count(written(tmp_path, SHARDED), asked)


def test_gpus_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def node_gpus(device: str, devices: list[int] | None) -> list[Gpu]:
        assert (device, devices) == ("auto", [0, 2])
        raise NoGpu("there is no GPU 2")

    monkeypatch.setattr(prepare, "node_gpus", node_gpus)
    with pytest.raises(StartError, match="there is no GPU 2"):
        node_count(written(tmp_path, "{devices: [0, 2]}"), None)


def test_settings_of_vllm(tmp_path: Path, base: Base) -> None:
    """A virtual environment's interpreter is a link, which stays one: its target has no packages."""
    (tmp_path / "python").symlink_to("/usr/bin/env")
    stated = "python: ./python, max_loras: 8, quantization: fp8, any_version: true, kv_share: 0.2"
    text = f"node: {{engine: vllm, vllm: {{{stated}}}}}\n"
    engine = node_config(load(tmp_path, text), base, tmp_path, node_id="n", gateway_url="http://g").engine
    arguments = {"max_loras": 8, "quantization": "fp8"}
    expected = VllmConfig(str(tmp_path / "python"), arguments, any_version=True, kv_share=0.2)
    assert (engine.engine, engine.vllm) == ("vllm", expected)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("enable_lora: false", "enable_lora: not taken, since the node always serves adapters"),
        ("max_lora_rank: 24", "max_lora_rank: 24 is none of 1, 8, 16"),
        ("max_loras: 0", "max_loras: 0 is no whole number above 0, or auto"),
        ("kv_share: 1", "kv_share: 1 is no number from 0 to below 1"),
        ("lora_target_modules: [q_proj]", "lora_target_modules: not taken, since the node names the modules"),
        ("python: 3.11", "python is the path of an interpreter"),
        ("any_version: '1'", "any_version is true or false"),
    ],
)
def test_settings_of_vllm_that_are_refused(tmp_path: Path, base: Base, stated: str, message: str) -> None:
    service = load(tmp_path, f"node: {{engine: vllm, vllm: {{{stated}}}}}\n")
    with pytest.raises(ServiceFileError, match=f"node.vllm: {message}|{message}"):
        node_config(service, base, tmp_path, node_id="n", gateway_url="http://g")
