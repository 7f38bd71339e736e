"""A registry with many functions of one adapter, written without a deployment of each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from adapters.blobs import blob_key
from adapters.deployment import AdapterUpload
from adapters.registry import Registry

TENANT = "bench"
WRITERS = 16


def fill(registry: Registry, adapter: Path, functions: int, orphans: int) -> None:
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    registry.deploy(TENANT, function_name(0), AdapterUpload(config.read_bytes(), weights))
    record, manifest = registry.function(TENANT, function_name(0)), registry.manifest(TENANT, function_name(0), 1)

    def write(number: int) -> None:
        folder, name = f"tenants/{TENANT}/functions/{function_name(number)}", function_name(number)
        _put(registry, f"{folder}/function.json", msgspec.structs.replace(record, name=name))
        _put(registry, f"{folder}/versions/1.json", msgspec.structs.replace(manifest, function=name))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(1, functions)))
        list(pool.map(lambda number: _put(registry, blob_key(f"{number:064x}"), {}), range(orphans)))


def function_name(number: int) -> str:
    return f"f{number:05d}"


def _put(registry: Registry, key: str, content: Any) -> None:
    registry.store.put(key, msgspec.json.encode(content))
