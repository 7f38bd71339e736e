"""Settings of one node. `garnish` fills them from serverless.yml and the command line."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

RUNNERS = {
    "auto": "node_agent.runner.auto_runner",
    "transformers": "node_agent.runner.transformers_runner",
    "cuda": "node_agent.runner.cuda_runner",
    "lightllm": "node_agent.runner.lightllm_open",
}
"""Module with `open_runner` for each value of `node.runner`."""

CPU_ADAPTER_MEMORY = 256 << 20
GPU_ADAPTER_PART = 10
"""Divisor for the default size of adapter memory: a GPU's memory divided by this number."""


def default_adapter_memory(gpu_memory: int | None) -> int:
    """Returns the default bytes for adapters: a part of the GPU's memory, or a constant on a CPU (`gpu_memory`
    None)."""
    return CPU_ADAPTER_MEMORY if gpu_memory is None else gpu_memory // GPU_ADAPTER_PART


GPU_PASS_PART = 10


def pass_memory(gpu_memory: int) -> int:
    """Returns the bytes of a GPU's memory for passes, captured graphs and libraries. Used where the service file sets
    no size for the KV cache."""
    return gpu_memory // GPU_PASS_PART


class LinkConfig(msgspec.Struct, frozen=True):
    """Simulated link, with bandwidth in bytes per second and latency in seconds. It delays transfers but never changes
    data."""

    bandwidth: float
    latency: float = 0.0


class DiskCacheConfig(msgspec.Struct, frozen=True):
    """Directory of a node's disk cache for artifacts, and its limit in bytes."""

    path: str
    bytes: int


class VllmConfig(msgspec.Struct, frozen=True):
    """Settings of a node that drives vLLM."""

    python: str = ""
    """Interpreter of the environment that has vLLM; empty: the node's own."""
    arguments: dict[str, Any] = {}
    """vLLM's engine arguments, by their own names."""
    any_version: bool = False
    """True: versions of vLLM that were never tried are not refused."""
    kv_share: float = 0.5
    """Minimum share, of the device memory that weights leave, for keys and values with `max_loras: auto`."""
    answer_s: float = 60.0
    """Seconds without a sign from vLLM, while an answer is due, after which the engine process ends itself."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine process. Sizes of memory are in bytes. Defaults that depend on the device are in
    node_agent/engine/setup.py."""

    model_dir: str
    base_id: str
    registry: str
    """Directory or s3:// URL of the object store."""
    engine: Literal["garnish", "vllm"] = "garnish"
    vllm: VllmConfig = VllmConfig()
    version: str = ""
    """Version of Garnish, which an engine process in another environment can't look up; empty: unknown."""
    device: str = "auto"
    """auto, cpu or cuda"""
    devices: tuple[int, ...] | None = None
    """NVML indices of the GPUs that nodes of this host may use; None: all."""
    gpu: str = ""
    """UUID of the GPU that the supervisor claimed for this node; empty: none."""
    runner: str = "auto"
    """key of RUNNERS"""
    dtype: str = "auto"
    """auto (the model's own), float32, float16 or bfloat16"""
    lora_kernel: str = "auto"
    """Triton kernel for the adapters of decode rows: auto, mbgmv or bgmv"""
    adapter_memory: int = 0
    """Bytes of adapter memory on the device; 0 means that they follow from the device."""
    host_memory: int = 1 << 30
    """Limit on the bytes of adapters in host memory."""
    kv_memory: int | None = None
    """Bytes of the KV cache. None on a GPU: all memory that the base model, the adapters and a part reserved for passes
    leave. None on a CPU: a quarter of the free memory, at most 1 GiB."""
    block_tokens: int = 16
    prefix_cache: str = "auto"
    """Mode of the prefix cache, auto or off. With auto, keys and values of finished requests stay cached while there is
    room. Later prompts of the same tenant and adapter with the same prefix use them."""
    max_rows: int = 0
    """Maximum sequences per iteration; 0 means the device's default (BY_DEVICE in engine/setup.py)."""
    max_cold: int = 0
    """Maximum open cold prefill passes; 0 means the device's default."""
    chunk_tokens: int = 0
    """Maximum prompt tokens per iteration; 0 means the device's default. Longer prompts are split into chunks."""
    queue_limit: int = 256
    adapter_slots: int = 256
    """Maximum adapters on the device, whatever their size."""
    threads: int | None = None
    """Number of torch threads. None: this node's share of the usable cores, or one for a model of a few megabytes."""
    host_nodes: int = 1
    """Number of nodes that share this host's cores, including this one."""
    cold_start: str = "auto"
    """Plan for adapters that are not on the device: auto, wait, pipeline or assist"""
    prefetch: str = "auto"
    """Mode of prefetching, auto or off. With auto, adapters that the gateway hints at are loaded while no other load is
    pending."""
    prefetch_waste: float = 0.25
    """Maximum share of prefetched bytes, 0 to 1, that may be wasted before prefetching slows down."""
    cpu_workers: int | None = None
    """Number of CPU LoRA workers, one core each. None: the node decides by measurement, within the cores that the
    engine leaves."""
    worker_repeats: int = 1
    """Number of times that CPU workers compute each command, to simulate slower cores; 1 is the normal speed."""
    profile: str | None = None
    """File of this node's measured costs. It is read if it was measured on this node, else measured and written. None:
    measured at each start."""
    load_link: LinkConfig | None = None
    """Simulated link between host memory and the device."""
    store_link: LinkConfig | None = None
    """Simulated link between the object store and this host."""
    eviction: str = "cost"
    """Eviction policy of device and host memory: cost, lru, lfu or gdsf"""
    disk_cache: DiskCacheConfig | None = None
    """Disk cache. None: adapters that are not in host memory are always read from the store."""


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one node: its supervisor, API process and engine process."""

    node_id: str
    pool: str = ""
    """Node pool of the node; empty: none."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port; 0: a free port, which the node announces in its record."""
    gateway_url: str
    secret_file: str
    run_dir: str
    """Directory of the node's sockets and logs, mode 0700."""
    stop_seconds: float = 5.0
    """Seconds for which open streams may continue after SIGTERM."""
    engine: EngineConfig


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the supervisor writes, as JSON, on the API process's standard input."""

    socket: str
    """path of the socket on which the API process waits for the engine"""
    parent: int
    """Process id of the supervisor; the child exits when the supervisor does."""
    heartbeat: int | None = None
    """Inherited descriptor of the engine's heartbeat (node_agent.heartbeat); None: the engine is not watched."""
    node: NodeConfig


class EngineProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the supervisor writes, as JSON, on the engine process's standard input."""

    socket: str
    """path of the socket that the engine connects to"""
    parent: int | None = None
    """Process id of the supervisor; the child exits when the supervisor does. None: no parent is watched."""
    heartbeat: int | None = None
    """Inherited descriptor of the memory for heartbeats (node_agent.heartbeat); None: none are written."""
    engine: EngineConfig
    gateway_url: str = ""
    """Gateway that stores the base model's manifest if the registry has none; empty: none."""
    secret_file: str = ""


class ProfileProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that `garnish profile` writes, as JSON, on the measuring process's standard input."""

    parent: int
    """Process id of the waiting `garnish` process; the measuring process exits when it does."""
    engine: EngineConfig
