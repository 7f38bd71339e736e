"""Checks, before a pool is planned, that a node fits on the GPUs of its instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from adapters.base_manifest import base_from_manifest, find_named_manifest
from adapters.base_model import UnsupportedBase
from adapters.base_sizes import BaseSizes, UnknownSizes, sizes_from_config, sizes_of_foreign
from adapters.errors import AdapterError
from adapters.model_families import FAMILIES
from adapters.open_store import open_store
from cluster.device_memory import NoRoom
from garnish.config import ServiceFile
from garnish.errors import StartError
from garnish.settings import registry_of, vllm_config
from infra.errors import InfraError
from infra.instances import Gpus, check_fits, gpus_of, need_of
from node_agent.config import default_adapter_memory, pass_memory
from node_agent.vllm.arguments import DEFAULTS
from node_agent.vllm.memory import plan_node


def check_memory(service: ServiceFile, state: Path) -> None:
    """Raises InfraError if the GPUs of a pool in AWS are unknown, or too small for a node.

    Raises StartError if the base model's config.json, or a manifest that is needed, can't be read. `state`: the state
    directory.
    """
    pools = {name: pool for name, pool in service.node_pools.items() if pool.backend == "aws"}
    if not pools:
        return
    config = base_model_config(service)
    sizes = _sizes(service, config, state) if service.node.engine == "vllm" else None
    for name, pool in pools.items():
        field = f"node_pools.{name}"
        kind = pool.instance_type or ""
        gpus = gpus_of(kind, f"{field}.instance_type")
        if sizes is None:
            _check_own_engine(service, config, field, kind, gpus)
        else:
            _check_vllm(service, config, sizes, field, kind, gpus)


def base_model_config(service: ServiceFile) -> dict[str, Any]:
    """Returns the content of the base model's config.json.

    For a Hugging Face id only that file is downloaded. Raises StartError.
    """
    file = service.path(service.base_model) / "config.json"
    try:
        if not file.is_file():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(service.base_model, "config.json", etag_timeout=10))
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (ImportError, OSError, ValueError, msgspec.DecodeError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise StartError(
            f"base_model: the config.json of {service.base_model} is needed to see whether a node fits on a GPU, and "
            f"can't be read ({reason}); name a directory that has it"
        ) from None


def _check_own_engine(service: ServiceFile, config: dict[str, Any], field: str, kind: str, gpus: Gpus) -> None:
    node = service.node
    adapters = node.adapter_memory if node.adapter_memory is not None else default_adapter_memory(gpus.memory)
    need = need_of(config, dtype=node.dtype, adapter_memory=adapters, kv_memory=node.kv_memory)
    if node.kv_memory is None:
        need = msgspec.structs.replace(need, runtime=max(need.runtime, pass_memory(gpus.memory)))
    check_fits(field, kind, gpus, need)


def _check_vllm(
    service: ServiceFile, config: dict[str, Any], sizes: BaseSizes, field: str, kind: str, gpus: Gpus
) -> None:
    node, vllm = service.node, vllm_config(service)
    arguments = DEFAULTS | vllm.arguments
    devices = int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))
    if devices > gpus.count:
        raise InfraError(f"{field}.instance_type: a node needs {devices} GPUs, and {kind} has {gpus.count}")
    try:
        plan_node(
            sizes,
            config,
            vllm,
            device=gpus.memory,
            dtype=node.dtype,
            kv_memory=node.kv_memory,
            max_rows=node.max_rows or 0,
        )
    except NoRoom as error:
        raise InfraError(f"{field}: {gpus.name} of {kind}: {error}") from None


def _sizes(service: ServiceFile, config: dict[str, Any], state: Path) -> BaseSizes:
    """Returns the base model's sizes: from its manifest if only vLLM serves it, else from its config.json. Raises
    InfraError or StartError."""
    if config.get("model_type") in FAMILIES:
        try:
            return sizes_from_config(config)
        except UnknownSizes as error:
            raise InfraError(str(error)) from None
    directory = service.path(service.base_model)
    base_id = directory.resolve().name if directory.is_dir() else service.base_model
    try:
        manifest = find_named_manifest(open_store(registry_of(service, state)), base_id)
        if manifest is None:
            raise StartError(
                f"base_model: the registry has no manifest of {base_id}, by which its size is known; run `garnish base "
                "inspect --store` on a host that has the model and transformers"
            )
        base = base_from_manifest(manifest, base_id)
    except (AdapterError, UnsupportedBase) as error:
        raise StartError(f"base_model: {error}") from None
    assert base.foreign is not None
    return sizes_of_foreign(base, base.foreign)
