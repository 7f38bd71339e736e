"""The device: which one, when work on it is done, and what memory is free on it."""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

log = logging.getLogger("garnish.engine")

Result = TypeVar("Result")

CLOSE_LIMIT_S = 10.0


class Event(Protocol):
    """Something enqueued earlier that ends at some point."""

    def query(self) -> bool:
        """Returns whether it has ended; never waits."""

    def synchronize(self) -> None:
        """Waits until the event has ended."""

    def wait(self) -> None:
        """Has whatever is enqueued on the current stream from now on run after the event. Returns at once."""


class EndedEvent:
    """Work on a CPU device has ended when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def wait(self) -> None:
        return None


ENDED = EndedEvent()


def record_event(device: torch.device, sleeps: bool = False) -> Event:
    """Returns an event behind everything enqueued on the current stream so far. `sleeps`: who synchronizes with it
    takes no processor's time meanwhile, and learns of its end a little later."""
    if device.type != "cuda":
        return ENDED
    event: torch.cuda.Event = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
    event.record()
    return event


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")
"""Parts, in lower case, of the messages of the CPU's allocator, CUDA and its libraries. These errors have no type."""


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether work failed for want of memory alone: a smaller piece of work may succeed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in OUT_OF_MEMORY)


def unless_out_of_memory(work: Callable[[], Result]) -> Result | None:
    """Does the work. Returns its result; None when there was too little memory for it: all that it held is free again
    then."""
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
    """Calls `then`, in a separate thread, when an event has ended that nobody waits for."""

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
        """Ends the thread, once what it watches has ended."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            event.synchronize()
            self._then()


def device_name(device: torch.device) -> str:
    """Returns the hardware's name as its maker calls it: the GPU's, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Runs the work and returns the seconds that it took on the device, when it has ended: on a GPU by events on the
    current stream, on a CPU by the host's clock."""
    if device.type != "cuda":
        started_at = time.perf_counter()
        work()
        return time.perf_counter() - started_at
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)  # the launches of what came before are not this work's
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def cpu_name() -> str:
    """Returns the processor's name, as the kernel has it; where the kernel does not say, what kind it is."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def hardware_name(device: torch.device) -> str:
    """Returns what computes: the GPU's name, or the processor's and the number of threads."""
    name = device_name(device)
    return name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads"


def pick_device(name: str) -> torch.device:
    """Returns the device of this name: `auto` takes the GPU when there is one. Raises ValueError for a device that is
    not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch sees no CUDA device; use auto or cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is unknown; use auto, cpu or cuda")
    return torch.device(name)


def gpu_memory(device: torch.device) -> int | None:
    """Returns all bytes of a GPU's memory, in use or not; None for a CPU, whose memory is not the node's alone."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def free_memory(device: torch.device) -> int:
    """Returns the bytes that may still be allocated on the device. On a GPU torch gives back what it keeps of freed
    memory: loading a model leaves some gigabytes of it, which the driver counts as taken."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def flush_denormals() -> None:
    """Has numbers below the least normal one taken for zero: a processor computes with them many times more slowly, and
    no token depends on them. Threads inherit it from the one that starts them, those of OpenMP's teams too: to be
    called before anything is computed."""
    torch.set_flush_denormal(True)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
