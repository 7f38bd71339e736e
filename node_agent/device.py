"""The compute device: its choice, events on it, its free memory and its name."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from node_agent.cores import cpu_name
from node_agent.device_event import ENDED, Event

log = logging.getLogger("garnish.engine")

Result = TypeVar("Result")

CLOSE_LIMIT_S = 10.0


def record_event(device: torch.device, sleeps: bool = False) -> Event:
    """Returns an event after all work enqueued so far on the current stream. With `sleeps`, `synchronize` blocks
    without using a CPU core, and returns slightly later."""
    if device.type != "cuda":
        return ENDED
    event: torch.cuda.Event = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
    event.record()
    return event


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")
"""Lower-case parts of out-of-memory messages of the CPU allocator, CUDA and its libraries. These errors have no
type."""


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether this error means that memory was short, so that a smaller piece of work may succeed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in OUT_OF_MEMORY)


def unless_out_of_memory(work: Callable[[], Result]) -> Result | None:
    """Runs `work` and returns its result. Returns None when memory was too short; whatever the work had allocated is
    then free again."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        log.error("out of memory", extra={"reason": str(error)[:500]})
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return None


class EventWatch:
    """Thread that calls `then` at the end of each event passed to `watch`."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, event: Event) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="event-watch", daemon=True)
            self._thread.start()
        self._events.put(event)

    def close(self) -> None:
        """Ends the thread after the watched events have ended."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event.synchronize()
            self._then()


def device_name(device: torch.device) -> str:
    """Returns the name that the vendor gives to the GPU or the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Runs the work, waits for it, and returns the seconds that it took. A GPU is timed by events on the current
    stream, a CPU by the host's clock."""
    if device.type != "cuda":
        started_at = time.perf_counter()
        work()
        return time.perf_counter() - started_at
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)  # exclude the launches of earlier work
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def hardware_name(device: torch.device) -> str:
    """Returns the GPU's name, or the processor's name and the number of torch threads."""
    name = device_name(device)
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def pick_device(name: str) -> torch.device:
    """Returns the device of this name; `auto` is the GPU if there is one. Raises ValueError for an absent or unknown
    device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch sees no CUDA device; use auto or cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is unknown; use auto, cpu or cuda")
    return torch.device(name)


def gpu_memory(device: torch.device) -> int | None:
    """Returns the total bytes of a GPU's memory, used or free. Returns None for a CPU, whose memory the node shares."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of the device. On a GPU, first returns torch's cached memory to the driver: after loading
    a model it is several gigabytes, which the driver counts as used."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def flush_denormals() -> None:
    """Makes the processor treat denormal numbers as zero: it computes with them many times more slowly, and no token
    depends on them.

    New threads, including OpenMP's, inherit the setting, so this must be called before any computation.
    """
    torch.set_flush_denormal(True)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
