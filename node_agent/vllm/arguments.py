"""vLLM's engine arguments for a node: what the service file states, what the node sets, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.device_memory import RANKS as RANKS
from node_agent.config import EngineConfig
from node_agent.vllm import worker_extension

LOG = "vLLM's log goes to the node's (VLLM_LOGGING_LEVEL in its environment sets the level)"
REFUSED = {
    "kv_cache_memory_bytes": "`node.kv_memory` says it",
    "enable_lora": "the node always serves adapters",
    "served_model_name": "the gateway names models",
    "model": "`base_model` names it",
    "tokenizer": "the gateway makes the prompts with the base model's tokenizer",
    "max_cpu_loras": "the node keeps adapters in host memory itself (`node.host_memory`)",
    "enable_prefix_caching": "`node.prefix_cache` says it",
    "worker_extension_cls": "the node's own one watches vLLM's slots",
    "disable_log_stats": "the node reads vLLM's figures",
    "logging_config": LOG,
    "log_level": LOG,
    "log_config_file": LOG,
    "lora_modules": "adapters come from the registry",
    "lora_target_modules": "the node names the modules that adapters may change, and a deploy is checked against them",
    "enable_sleep_mode": "a node must always be ready",
    "data_parallel_size": "run one node for each replica",
    "api_server_count": "the node has no HTTP server of vLLM",
}
"""Arguments that would break a promise of the service, each with the reason."""
AUTO = "auto"
"""Value of `max_loras` for as many slots as fit (node_agent.vllm.memory)."""
COUNTS = ("max_loras", "max_lora_rank", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "nnodes")
"""Arguments that are whole numbers above 0."""
VERSIONS = ("0.32", "0.33")
"""Versions of vLLM whose functions the node calls as they are there."""
DEFAULTS: dict[str, Any] = {
    "max_loras": AUTO,
    "max_lora_rank": 64,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.9,
    "structured_outputs_config": {"backend": "guidance"},  # what the gateway checks schemas by
}


def check_arguments(stated: dict[str, Any]) -> str:
    """Returns what is wrong with the arguments that a service file states; empty if nothing is."""
    for name in stated:
        if name in REFUSED:
            return f"{name}: not taken, since {REFUSED[name]}"
    for name in COUNTS:
        value = stated.get(name, 1)
        if (type(value) is not int or value < 1) and (name, value) != ("max_loras", AUTO):
            hint = f", or {AUTO}" if name == "max_loras" else ""
            return f"{name}: {value!r} is no whole number above 0{hint}"
    share = stated.get("gpu_memory_utilization", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        return f"gpu_memory_utilization: {share!r} is no number above 0, at most 1"
    if stated.get("max_lora_rank", RANKS[0]) not in RANKS:
        return f"max_lora_rank: {stated['max_lora_rank']} is none of {', '.join(map(str, RANKS))}"
    return ""


def host_gpus(stated: dict[str, Any]) -> int:
    """Returns the number of this host's GPUs that vLLM computes on, by checked arguments."""
    ranks = stated.get("tensor_parallel_size", 1) * stated.get("pipeline_parallel_size", 1)
    return max(1, int(ranks // stated.get("nnodes", 1)))


def check_version(version: str, any_version: bool) -> None:
    """Raises ValueError for a version of vLLM that is not one of VERSIONS, unless `any_version` is True."""
    if any_version or ".".join(version.split(".")[:2]) in VERSIONS:
        return
    raise ValueError(
        f"vLLM {version} is not supported: {' and '.join(VERSIONS)} are; install one of these, or try this one with "
        "node.vllm.any_version: true"
    )


def engine_arguments(config: EngineConfig, slots: int, targets: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the arguments of vLLM's `AsyncEngineArgs`, with the number of slots that was planned. `targets`: last
    names of the modules that adapters may change; empty: all that vLLM can adapt.

    Raises ValueError for arguments that are refused.
    """
    stated = config.vllm.arguments
    problem = check_arguments(stated)
    if problem:
        raise ValueError(f"node.vllm.{problem}")
    arguments = DEFAULTS | stated
    if targets:
        arguments["lora_target_modules"] = list(targets)
    if config.max_rows:
        arguments["max_num_seqs"] = config.max_rows
    if config.dtype != "auto":
        arguments["dtype"] = config.dtype
    if config.kv_memory is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_memory
    return arguments | {
        "model": config.model_dir,
        "served_model_name": config.base_id,
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "enable_prefix_caching": config.prefix_cache == "auto",
        "worker_extension_cls": worker_extension.NAME,
        "disable_log_stats": False,
    }
