"""Builds the settings of the gateway and of each node from serverless.yml."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from adapters.open_store import store_kind
from adapters.peft_config import MAX_RANK
from garnish.config import ServiceFile
from garnish.errors import ServiceFileError, StartError
from gateway.config import MAX_TIMEOUT, ConfigError, GatewayConfig, check_config
from node_agent.config import DiskCacheConfig, EngineConfig, LinkConfig, NodeConfig, VllmConfig
from node_agent.supervisor import STOP_SLACK
from node_agent.vllm.arguments import DEFAULTS, check_arguments

UP_STOP_SECONDS = 25
"""Default seconds that open requests get to finish when `garnish up` ends.

It is shorter than SERVICE_STOP_SECONDS, since the user is waiting, and since many supervisors of processes kill after
30 seconds.
"""

SERVICE_STOP_SECONDS = MAX_TIMEOUT + 10.0
"""Seconds that open requests get to finish when a separately started node or gateway stops.

The longest call fits in this time. The process's supervisor, such as systemd, may kill it earlier.
"""
POOL_NODE_STOP_SECONDS = SERVICE_STOP_SECONDS + STOP_SLACK + 5.0
"""Seconds that a node of a local pool gets to stop; the longest call can finish in this time."""
DISK_CACHE_BYTES = 10 << 30
MAX_RUN_DIRECTORY = 90
"""Maximum bytes of the path of a run directory. Linux allows 107 bytes for the path of the socket in it."""

AS_STATED = (
    "device", "runner", "lora_kernel", "dtype", "prefix_cache", "cold_start", "eviction", "prefetch", "prefetch_waste",
)  # fmt: skip
BY_DEVICE = ("adapter_memory", "host_memory", "kv_memory", "max_rows", "max_cold", "chunk_tokens")
"""Settings that the service file and the engine have under the same names.

For a setting that is None the engine chooses a value that suits its device.
"""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class Base(msgspec.Struct, frozen=True):
    """Directory and id of the base model."""

    directory: Path
    id: str


def resolve_base(service: ServiceFile) -> Base:
    """Returns the base model's directory and id.

    A Hugging Face model that is not in the cache is downloaded. Raises StartError if there is no such model.
    """
    written = service.base_model
    directory = service.path(written)
    if (directory / "config.json").is_file():
        return Base(directory, directory.resolve().name)
    if directory.exists():
        raise StartError(f"base_model: {directory} has no config.json, so it is not a Hugging Face model directory")
    if not _HUB_ID.fullmatch(written) or written.startswith("models/"):
        raise StartError(
            f"base_model: there is no directory {directory}; run `make demo-model` to make the demo model, "
            "or name a Hugging Face id or directory"
        )
    return Base(_fetch(written), written)


def _fetch(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise StartError(
            "base_model: fetching a Hugging Face id needs huggingface_hub: install garnish[node]"
        ) from None
    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, etag_timeout=10))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartError(
            f"base_model: {hub_id} can't be fetched from Hugging Face ({reason}); "
            "if this machine is offline, name a directory that holds the model"
        ) from None


def registry_of(service: ServiceFile, state: Path) -> str:
    if service.registry is None:
        return str(state / "registry")
    return service.registry if "://" in service.registry else str(service.path(service.registry))


def secret_file_of(service: ServiceFile, state: Path) -> Path:
    written = service.gateway.secret_file
    return state / "cluster.secret" if written is None else service.path(written)


def gateway_config(
    service: ServiceFile,
    base: Base,
    state: Path,
    *,
    host: str | None = None,
    port: int | None = None,
    shutdown_seconds: float | None = None,
) -> GatewayConfig:
    """Returns the gateway's settings.

    `host` and `port`, from the command line, take precedence over the file. Open requests get `shutdown_seconds` to
    finish when the gateway stops. Raises ServiceFileError.
    """
    bounds: dict[str, Any] = {"hold_seconds": service.gateway.hold, "shutdown_seconds": shutdown_seconds}
    config = GatewayConfig(
        model_dir=str(base.directory),
        base_id=base.id,
        registry=registry_of(service, state),
        secret_file=str(secret_file_of(service, state)),
        tmp_dir=str(state / "uploads"),
        usage_dir=str(state / "usage"),
        host=service.gateway.host if host is None else host,
        port=service.gateway.port if port is None else port,
        max_lora_rank=_max_rank(service),
        waits_for_base=service.node.engine == "vllm",
        workers=service.gateway.workers,
        redis=service.gateway.redis,
        node_hosts=tuple(service.gateway.node_hosts or ()),
        auth="keys" if service.auth == "keys" else "none",
        allowed_sources=tuple(service.gateway.allowed_sources or ()),
        webhook_hosts=tuple(service.gateway.webhook_hosts or ()),
        cors_origins=tuple(service.gateway.cors_origins or ()),
        policy=service.gateway.policy,
        predictor=service.gateway.predictor,
        prices=service.prices,
        **{name: seconds for name, seconds in bounds.items() if seconds is not None},
    )
    try:
        check_config(config)
    except ConfigError as error:
        raise ServiceFileError(service.file, None, "", str(error)) from None
    return config


def _max_rank(service: ServiceFile) -> int:
    """Returns the largest rank that this file's nodes take."""
    arguments = DEFAULTS | vllm_config(service).arguments
    return int(arguments["max_lora_rank"]) if service.node.engine == "vllm" else MAX_RANK


def node_config(
    service: ServiceFile,
    base: Base,
    state: Path,
    *,
    node_id: str,
    gateway_url: str,
    secret_file: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    host_nodes: int = 1,
    stop_seconds: float = UP_STOP_SECONDS,
    pool: str = "",
) -> NodeConfig:
    """Returns the settings of one node. The host's cores are shared by `host_nodes` nodes, including this one."""
    return NodeConfig(
        node_id=node_id,
        pool=pool,
        host=host,
        port=port,
        gateway_url=gateway_url,
        secret_file=str(secret_file or secret_file_of(service, state)),
        run_dir=str(run_directory(state, node_id)),
        stop_seconds=stop_seconds,
        engine=_engine_config(service, base, state, node_id, host_nodes),
    )


def run_directory(state: Path, node_id: str) -> Path:
    """Returns the folder of a node's Unix socket.

    It is in the state directory, or in /tmp if its path would be too long. The node creates the folder so that only its
    user has access, and refuses an existing folder of another user.
    """
    inside = state / "run" / node_id
    if len(os.fsencode(inside)) <= MAX_RUN_DIRECTORY:
        return inside
    name = hashlib.sha256(os.fsencode(inside)).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"garnish-{name}"


def _engine_config(service: ServiceFile, base: Base, state: Path, node_id: str, host_nodes: int) -> EngineConfig:
    node = service.node
    settings = {name: getattr(node, name) for name in (*AS_STATED, *BY_DEVICE)}
    link, store = node.simulate.link, node.simulate.store
    return EngineConfig(
        model_dir=str(base.directory),
        base_id=base.id,
        registry=registry_of(service, state),
        engine=node.engine,
        vllm=vllm_config(service),
        version=version("garnish"),
        devices=None if node.devices == "all" else tuple(node.devices),
        host_nodes=host_nodes,
        cpu_workers=None if node.cpu_workers == "auto" else node.cpu_workers,
        profile=str(state / "profiles" / f"{node_id}.json"),
        load_link=LinkConfig(bandwidth=link) if link is not None else None,
        store_link=LinkConfig(bandwidth=store) if store is not None else None,
        worker_repeats=node.simulate.worker_repeats,
        disk_cache=_disk_cache(service, state, node_id),
        **{name: value for name, value in settings.items() if value is not None},
    )


def vllm_config(service: ServiceFile) -> VllmConfig:
    """Returns the settings of vLLM: its interpreter, which may be relative to the service file, and its engine
    arguments. Raises ServiceFileError for arguments that are refused."""
    stated = dict(service.node.vllm)
    python, any_version = stated.pop("python", ""), stated.pop("any_version", False)
    kv_share = stated.pop("kv_share", VllmConfig().kv_share)
    if not isinstance(python, str) or not isinstance(any_version, bool):
        raise ServiceFileError(
            service.file, None, "node.vllm", "python is the path of an interpreter, and any_version is true or false"
        )
    if isinstance(kv_share, bool) or not isinstance(kv_share, int | float) or not 0 <= kv_share < 1:
        raise ServiceFileError(
            service.file, None, "node.vllm", f"kv_share: {kv_share!r} is no number from 0 to below 1"
        )
    problem = check_arguments(stated)
    if problem:
        raise ServiceFileError(service.file, None, "node.vllm", problem)
    # The interpreter of a virtual environment is a symbolic link, which must not be resolved.
    path = python and os.path.abspath(service.path(python))
    return VllmConfig(path, stated, any_version=any_version, kv_share=float(kv_share))


def _disk_cache(service: ServiceFile, state: Path, node_id: str) -> DiskCacheConfig | None:
    """Returns the settings of a node's disk cache, or None if it has no cache.

    By default the cache has 10 GiB for a remote registry. For a registry in a directory there is no cache by default.
    """
    stated = service.node.disk_cache
    if stated == "off" or (stated is None and not store_kind(registry_of(service, state)).remote):
        return None
    path = stated.path if stated is not None else None
    size = stated.bytes if stated is not None else None
    directory = state / "cache" if path is None else service.path(path)
    return DiskCacheConfig(str(directory / node_id), DISK_CACHE_BYTES if size is None else size)
