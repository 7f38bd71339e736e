"""Settings of one node. `garnish` fills them from serverless.yml and the command line; parts take what they use."""

from __future__ import annotations

import msgspec

RUNNERS = {
    "auto": "node_agent.runner.auto_runner",
    "transformers": "node_agent.runner.transformers_runner",
    "cuda": "node_agent.runner.cuda_runner",
    "lightllm": "node_agent.runner.lightllm_open",
}
"""Values of `node.runner`, each with the module whose `open_runner` opens it."""

CPU_ADAPTER_MEMORY = 256 << 20
GPU_ADAPTER_PART = 10
"""Fraction 1/n of a GPU's memory that adapters have, where the service file does not say."""


def default_adapter_memory(gpu_memory: int | None) -> int:
    """Returns the bytes for adapters where the service file does not say: a part of a GPU's memory; None: on a CPU."""
    return CPU_ADAPTER_MEMORY if gpu_memory is None else gpu_memory // GPU_ADAPTER_PART


GPU_PASS_PART = 10


def pass_memory(gpu_memory: int) -> int:
    """Returns the bytes of a GPU's memory for passes, captured graphs and libraries. It counts where the service file
    does not say what keys and values get."""
    return gpu_memory // GPU_PASS_PART


class LinkConfig(msgspec.Struct, frozen=True):
    """A simulated link: it delays transfers and never changes data. Bytes per second; seconds."""

    bandwidth: float
    latency: float = 0.0


class DiskCacheConfig(msgspec.Struct, frozen=True):
    """Directory in which a node caches artifacts on its own disk, and its limit in bytes."""

    path: str
    bytes: int


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine process. Memory sizes are in bytes. 0 for a size, where it says so: by the device
    (node_agent/engine/setup.py)."""

    model_dir: str
    base_id: str
    registry: str
    """Directory, or s3:// URL, of the object store."""
    device: str = "auto"
    """auto, cpu or cuda"""
    devices: tuple[int, ...] | None = None
    """GPUs of this host that nodes may have, as NVML counts them; None: all."""
    gpu: str = ""
    """UUID of the GPU that the node has for itself, once its supervisor has claimed one; empty: it has none."""
    runner: str = "auto"
    """key of RUNNERS"""
    dtype: str = "auto"
    """auto (the model's own), float32, float16 or bfloat16"""
    lora_kernel: str = "auto"
    """auto, mbgmv or bgmv: which Triton kernel adds the adapters to decode rows"""
    adapter_memory: int = 0
    """0: by the device"""
    host_memory: int = 1 << 30
    """Bound on adapters kept in host memory between their calls."""
    kv_memory: int | None = None
    """Bytes of keys and values. None: on a GPU what the base model and adapters leave, less a part for passes; on a CPU
    a quarter of the free memory, at most 1 GiB."""
    block_tokens: int = 16
    prefix_cache: str = "auto"
    """auto: keys and values of a request are kept behind its end while there is room, for those of the same tenant and
    adapter that begin as it did; off"""
    max_rows: int = 0
    """Sequences that one iteration advances at most; 0: by the device."""
    max_cold: int = 0
    """Cold prefill passes that may be open at once; 0: by the device."""
    chunk_tokens: int = 0
    """Prompt tokens that one iteration computes at most; a longer prompt is computed in chunks. 0: by the device."""
    queue_limit: int = 256
    adapter_slots: int = 256
    """Adapters that may be on the device at once, whatever their size."""
    threads: int | None = None
    """torch threads. None: this node's share of the cores that the process may really use (one for a model of a few
    megabytes)."""
    host_nodes: int = 1
    """Nodes on this host, this one included, that divide its cores among them."""
    cold_start: str = "auto"
    """auto, wait, pipeline or assist: how adapters that are not on the device may get there"""
    prefetch: str = "auto"
    """auto: what the gateway wants here is brought in while nothing else is to be loaded; off"""
    prefetch_waste: float = 0.25
    """Share of prefetched bytes, 0 to 1, that may be wasted before prefetching backs off."""
    cpu_workers: int | None = None
    """CPU LoRA workers, a core each; None: as many cores as the engine leaves"""
    worker_repeats: int = 1
    """Times that CPU workers do the same work, to simulate slower cores."""
    profile: str | None = None
    """File of this node's measured costs: read if it is of this node, else measured and written. None: measured."""
    load_link: LinkConfig | None = None
    """Simulated link between host memory and the device."""
    store_link: LinkConfig | None = None
    """Simulated link between the object store and this host."""
    eviction: str = "cost"
    """cost, lru, lfu or gdsf: which adapters leave device and host memory first"""
    disk_cache: DiskCacheConfig | None = None
    """Cache on the disk. None: adapters are read from the store whenever they are not in host memory."""


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one node: its supervisor, API process and engine process."""

    node_id: str
    pool: str = ""
    """The node pool that it belongs to; empty: none."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free port, which the node announces in its record."""
    gateway_url: str
    secret_file: str
    run_dir: str
    """Sockets and logs of this node; mode 0700."""
    stop_seconds: float = 5.0
    """Seconds for which open streams may continue after TERM."""
    engine: EngineConfig


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the supervisor writes, as JSON, on the API process's standard input."""

    socket: str
    """path on which the API process awaits the engine"""
    parent: int
    """The supervisor's process id: the child ends when that process has."""
    node: NodeConfig


class EngineProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the supervisor writes, as JSON, on the engine process's standard input."""

    socket: str
    """path to which the engine connects"""
    parent: int | None = None
    """The supervisor's process id: the child ends when that process has. None: it lives on its own."""
    engine: EngineConfig


class ProfileProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that `garnish profile` writes, as JSON, on the measuring process's standard input."""

    parent: int
    """The process that waits for it: it ends when that one has."""
    engine: EngineConfig
