"""AWS instance types with NVIDIA GPUs, and the check that a node fits on such a GPU."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from adapters.base_sizes import ITEM_BYTES, UnknownSizes, dtype_of, sizes_from_config
from infra.errors import InfraError

MIB = 1 << 20
MIN_KV_TOKENS = 8192
"""Tokens of KV memory for all running requests, if the service file has no kv_memory.

If the base model's longest context is shorter, its length is used instead.
"""
RUNTIME = 1 << 30
"""Device memory in bytes for the driver's context, kernels and activations."""
GIB = float(1 << 30)


class Gpus(msgspec.Struct, frozen=True):
    name: str
    count: int
    memory: int


_T4, _A10G, _L4, _L40S = ("T4", 15_360), ("A10G", 23_028), ("L4", 23_034), ("L40S", 46_068)
_A100, _A100_80, _H100, _H200 = ("A100 40GB", 40_960), ("A100 80GB", 81_920), ("H100", 81_559), ("H200", 143_771)

_G = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1, "24xlarge": 4, "48xlarge": 8}

_FAMILIES: dict[str, tuple[tuple[str, int], dict[str, int]]] = {
    "g4dn": (_T4, {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1}),
    "g5": (_A10G, _G),
    "g6": (_L4, _G),
    "g6e": (_L40S, _G),
    "p4d": (_A100, {"24xlarge": 8}),
    "p4de": (_A100_80, {"24xlarge": 8}),
    "p5": (_H100, {"4xlarge": 1, "48xlarge": 8}),
    "p5en": (_H200, {"48xlarge": 8}),
}

INSTANCE_TYPES: dict[str, Gpus] = {
    f"{family}.{size}": Gpus(name, count, mib * MIB)
    for family, ((name, mib), sizes) in _FAMILIES.items()
    for size, count in sizes.items()
}


def devices_of(instance_type: str, devices: Sequence[int] | None, field: str) -> list[int]:
    """Returns the indices of the GPUs of an instance that get a node: `devices`, or all GPUs if it is None.

    Raises InfraError for a GPU that the type does not have.
    """
    count = gpus_of(instance_type, field).count
    if devices is None:
        return list(range(count))
    if max(devices) >= count:
        raise InfraError(f"node.devices: there is no GPU {max(devices)} on {instance_type}, which has {count}")
    return sorted(devices)


def gpus_of(instance_type: str, field: str) -> Gpus:
    """Returns the GPUs of an AWS instance type. Raises InfraError for a type that is unknown or has no GPU."""
    gpus = INSTANCE_TYPES.get(instance_type)
    if gpus is None:
        near = difflib.get_close_matches(instance_type, INSTANCE_TYPES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InfraError(
            f"{field}: unknown instance type {instance_type!r}; {hint}known families: {', '.join(_FAMILIES)}"
        )
    return gpus


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory that a node needs, by purpose, in bytes."""

    weights: int
    adapters: int
    kv: int
    runtime: int = RUNTIME

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.kv + self.runtime


def need_of(config: Mapping[str, Any], *, dtype: str, adapter_memory: int, kv_memory: int | None) -> Need:
    """Returns the minimal device memory of a node.

    `config` is the base model's config.json, and `dtype` is the value in the service file. `adapter_memory` and
    `kv_memory` are in bytes. `kv_memory` None means the memory for MIN_KV_TOKENS tokens, or for the model's longest
    context if that is shorter. Raises InfraError for an unknown dtype, or for a model that is not Llama-like.
    """
    try:
        sizes = sizes_from_config(config)
    except UnknownSizes as error:
        raise InfraError(str(error)) from None
    if dtype == "auto":
        dtype = dtype_of(config)
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise InfraError(f"base_model: its dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    if kv_memory is None:
        kv_memory = min(MIN_KV_TOKENS, sizes.context) * sizes.kv * item
    return Need(weights=sizes.weights(item), adapters=adapter_memory, kv=kv_memory)


def check_fits(field: str, instance_type: str, gpus: Gpus, need: Need) -> None:
    """Raises InfraError with the numbers if a node does not fit on one GPU of the instance."""
    if need.total > gpus.memory:
        raise InfraError(
            f"{field}: a node does not fit on the {gpus.name} of {instance_type}: it needs {need.total / GIB:.1f} GiB "
            f"({need.weights / GIB:.1f} base model, {need.adapters / GIB:.1f} adapter_memory, {need.kv / GIB:.1f} keys "
            f"and values, {need.runtime / GIB:.1f} runtime), and a GPU has {gpus.memory / GIB:.1f} GiB; "
            "choose a larger type, or less adapter_memory or kv_memory"
        )
