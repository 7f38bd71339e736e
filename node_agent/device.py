"""The device: which one, when work on it is done, and what memory is free on it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch


class Event(Protocol):
    """Something enqueued earlier that ends at some point."""

    def query(self) -> bool:
        """True once it has ended; never waits."""

    def synchronize(self) -> None:
        """Returns when it has ended."""

    def wait(self) -> None:
        """Whatever is enqueued on the current stream from now on runs after it. Returns at once."""


class EndedEvent:
    """Work on a CPU device has ended when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def wait(self) -> None:
        return None


ENDED = EndedEvent()


def record_event(device: torch.device) -> Event:
    """An event behind everything enqueued on the current stream so far."""
    if device.type != "cuda":
        return ENDED
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def device_name(device: torch.device) -> str:
    """Of the hardware: the GPU's, or the processor's, as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """How long the work takes on the device: by events on its stream, on a CPU by the clock. Returns when it has
    ended."""
    if device.type != "cuda":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)  # the launches of what came before are not this work's
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def cpu_name() -> str:
    """The processor's, as the kernel has it; where it does not say, what kind it is."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def hardware_name(device: torch.device) -> str:
    """What computes: the GPU's name, or the processor's and how many threads."""
    name = device_name(device)
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def pick_device(name: str) -> torch.device:
    """`auto` takes the GPU when there is one. Raises ValueError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch sees no CUDA device; use auto or cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is unknown; use auto, cpu or cuda")
    return torch.device(name)


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def flush_denormals() -> None:
    """Take numbers below the least normal one for zero: a processor computes with them many times more slowly, and no
    token depends on them. Threads inherit it from the one that starts them, those of OpenMP's teams too: to be called
    before anything is computed."""
    torch.set_flush_denormal(True)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
