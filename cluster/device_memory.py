"""Plan of the device memory of a node with vLLM: how many adapter slots fit, and the sum when something does not."""

from __future__ import annotations

import msgspec

GIB = float(1 << 30)
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that the slots of vLLM can have."""
DEFAULT_KV_SHARE = 0.5
"""Default share, of the memory that weights and runtime leave, that stays for keys and values when the number of slots
is chosen."""


class NoRoom(ValueError):
    """The device is too small for what was stated; the message has the sum."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of each of a node's devices by purpose, in bytes. vLLM reserves all slots at its start."""

    weights: int
    slot: int
    """Bytes of one slot: one adapter for all modules, at the largest rank."""
    slots: int
    kv: int
    runtime: int
    """Libraries, activations and captured graphs."""
    device: int
    """Bytes of the device that vLLM may use."""

    @property
    def total(self) -> int:
        return self.weights + self.slots * self.slot + self.kv + self.runtime

    def __str__(self) -> str:
        """Returns the sum, as it is shown to operators."""
        return (
            f"{_gib(self.weights)} weights + {_gib(self.slots * self.slot)} adapter slots ({self.slots} x "
            f"{_gib(self.slot)}) + {_gib(self.kv)} keys and values + {_gib(self.runtime)} runtime = "
            f"{_gib(self.total)} GiB of {_gib(self.device)} GiB"
        )


class MemoryTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decide how a device's memory is divided. Sizes are in bytes."""

    slots: int | None
    """Number of slots; None: as many as fit, at most `max_slots`."""
    max_slots: int
    kv: int | None
    """Keys and values; None: what the rest leaves, at least `min_kv`."""
    min_kv: int
    """Keys and values of the longest sequence, without which vLLM does not start."""
    kv_share: float = DEFAULT_KV_SHARE


def plan_memory(target: MemoryTarget, *, weights: int, slot: int, runtime: int, device: int) -> DeviceMemory:
    """Returns the division of a device's memory. Raises NoRoom with the sum when not even one slot, or the stated
    number of slots, fits next to the keys and values."""
    rest = device - weights - runtime
    min_kv = target.min_kv if target.kv is None else target.kv
    slots = target.slots
    if slots is None:
        reserved = target.kv if target.kv is not None else max(min_kv, int(target.kv_share * max(rest, 0)))
        slots = max(1, min((rest - reserved) // slot, target.max_slots))
    kv = max(min_kv, rest - slots * slot) if target.kv is None else target.kv
    plan = DeviceMemory(weights=weights, slot=slot, slots=slots, kv=kv, runtime=runtime, device=device)
    if plan.total > device:
        raise NoRoom(str(plan))
    return plan


def with_rank(memory: DeviceMemory, rank: int, new_rank: int) -> DeviceMemory:
    """Returns the memory that as many slots of rank `new_rank`, instead of `rank`, would take. Keys and values
    shrink."""
    slot = memory.slot * new_rank // max(rank, 1)
    room = memory.device - memory.weights - memory.runtime - memory.slots * slot
    return msgspec.structs.replace(memory, slot=slot, kv=max(0, min(memory.kv, room)))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size < GIB else f"{size / GIB:.1f}"
