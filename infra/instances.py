"""Instance types with NVIDIA GPUs that a pool of the backend `aws` may have: how many GPUs, and each one's memory."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import msgspec

from infra.errors import InfraError

MIB = 1 << 20


class Gpus(msgspec.Struct, frozen=True):
    name: str
    count: int
    memory: int
    """Bytes of one GPU, as its driver reports the total."""


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
    """Returns the GPUs of an instance that get a node: `devices`, or all of them if that is None. Raises InfraError for
    one that the type does not have."""
    count = gpus_of(instance_type, field).count
    if devices is None:
        return list(range(count))
    if max(devices) >= count:
        raise InfraError(f"node.devices: there is no GPU {max(devices)} on {instance_type}, which has {count}")
    return sorted(devices)


def gpus_of(instance_type: str, field: str) -> Gpus:
    """Returns the GPUs of an instance type; `field` names the setting in errors. Raises InfraError for a type that is
    unknown, or has no GPU."""
    found = INSTANCE_TYPES.get(instance_type)
    if found is None:
        near = difflib.get_close_matches(instance_type, INSTANCE_TYPES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InfraError(
            f"{field}: unknown instance type {instance_type!r}; {hint}known families: {', '.join(_FAMILIES)}"
        )
    return found
