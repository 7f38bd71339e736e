"""vLLM's engine arguments for a node: what the service file states, what the node sets, and what it refuses."""

from __future__ import annotations

from typing import Any

from node_agent.config import EngineConfig
from node_agent.vllm import worker_extension

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
    "lora_modules": "adapters come from the registry",
    "enable_sleep_mode": "a node must always be ready",
    "data_parallel_size": "run one node for each replica",
    "api_server_count": "the node has no HTTP server of vLLM",
}
"""Arguments that would break a promise of the service, each with the reason."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for `max_lora_rank`."""
COUNTS = ("max_loras", "max_lora_rank", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "nnodes")
"""Arguments that are whole numbers above 0."""
VERSIONS = ("0.32", "0.33")
"""Versions of vLLM whose functions the node calls as they are there."""
DEFAULTS: dict[str, Any] = {
    "max_loras": 4,
    "max_lora_rank": 64,
    "max_num_seqs": 32,
    "structured_outputs_config": {"backend": "guidance"},  # what the gateway checks schemas by
}


def check_arguments(stated: dict[str, Any]) -> str:
    """Returns what is wrong with the arguments that a service file states; empty if nothing is."""
    for name in stated:
        if name in REFUSED:
            return f"{name}: not taken, since {REFUSED[name]}"
    for name in COUNTS:
        if name in stated and (type(stated[name]) is not int or stated[name] < 1):
            return f"{name}: {stated[name]!r} is no whole number above 0"
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


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """Returns the arguments of vLLM's `AsyncEngineArgs`. Raises ValueError for those that are refused."""
    stated = config.vllm.arguments
    problem = check_arguments(stated)
    if problem:
        raise ValueError(f"node.vllm.{problem}")
    arguments = DEFAULTS | stated
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
        "max_cpu_loras": arguments["max_loras"],
        "enable_prefix_caching": config.prefix_cache == "auto",
        "worker_extension_cls": worker_extension.NAME,
    }
