"""The device's side of a handoff, on its stream: handoff.cu, compiled by NVRTC and launched through the driver.

Memory order, on top of that of `handoff`. Every block stores its part of x; the barrier orders its threads' stores
before the ticket, which is a release (and acquire) at device scope. The last block's ticket thus happens after all
parts were stored. What that block does next, a release store of each command flag at system scope, makes all of them
visible to the host thread that acquires the flag. Its threads store one worker's flag each: the barrier after the
ticket carries the ticket's order to them. The commands themselves the host wrote before it launched. The waiting kernel
acquires the done flags at system scope; kernels after it on the stream see what the workers wrote.

A worker never needs anything from this device, so a wait can't be part of a circle; it is bounded all the same. A wait
that times out sets `poisoned`, and what follows in the pass neither signals nor waits: its rows must not be used.
Neither kernel may run in a captured graph. The memory is the handoff memory, registered with CUDA by the process that
launches. cuda.bindings come with every CUDA build of torch that is supported here.
"""

from __future__ import annotations

import ctypes
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

import torch

from kernels.build import CompileError

SOURCE, HEADER = "handoff.cu", "handoff_order.h"
THREADS = 256
MOST_BLOCKS = 64
"""Enough to fill a link to host memory; each takes a ticket."""
VECTOR = 16
"""Bytes that a thread moves at a time"""
Argument = ctypes.c_void_p | ctypes.c_longlong | ctypes.c_ulonglong | ctypes.c_int


class Signal(NamedTuple):
    """What the device signals to W workers, or awaits of them. Flags and values lie a cache line apart, in registered
    host memory: i64[W, 8], of which column 0 counts."""

    flags: torch.Tensor
    values: torch.Tensor
    """what the flags become; 0: nothing is signalled, or awaited"""
    poisoned: torch.Tensor
    """i32[1] on the device: set in a pass that has failed"""


class StreamKernels(Protocol):
    """Handoffs between a device and workers: both operations are enqueued on the current stream and return at once."""

    def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, signal: Signal) -> None:
        """Enqueues target = x, then flags[w] = values[w] for every worker w whose value is not 0; nothing where
        `poisoned` is set. x contiguous on the device, target of its shape in registered host memory; ticket i32[1] on
        the device, 0 before and after."""

    def wait(self, signal: Signal, timeout_ns: int, failed: torch.Tensor) -> None:
        """Has later work on the stream begin when every flag is its value, or after timeout_ns: then `poisoned` becomes
        1, and so does failed i32[1] in registered host memory. Value 0, or poisoned already: no wait."""


def compile_cubin(capability: tuple[int, int]) -> bytes:
    """Compiles handoff.cu for this compute capability; needs no GPU. Raises CompileError."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(f"cuda.bindings, which torch's CUDA builds bring, can't be imported: {error}") from error
    source, header = ((files(__package__) / name).read_bytes() for name in (SOURCE, HEADER))
    try:
        program = _checked(nvrtc.nvrtcCreateProgram(source, SOURCE.encode(), 1, [header], [HEADER.encode()]))
        options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
        done = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(done[0]):
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{SOURCE}: {log.decode(errors='replace').strip()[-500:]}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    except (OSError, RuntimeError) as error:  # a library that is not there, or older than the driver's interface
        raise CompileError(f"{SOURCE}: {error}") from error
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


class CudaKernels:
    """StreamKernels. Made and used by one thread, on one device."""

    def __init__(self, device: torch.device) -> None:
        """Compiles the kernels and loads them on the device. Raises CompileError."""
        cubin = compile_cubin(torch.cuda.get_device_capability(device))
        from cuda.bindings import driver

        torch.zeros(1, device=device)  # the device's context is this thread's from here on
        self._device, self._driver = device, driver
        self._module = _checked(driver.cuModuleLoadData(cubin))
        names = (b"copy_and_signal", b"wait_for_workers")
        self._functions = {name: _checked(driver.cuModuleGetFunction(self._module, name)) for name in names}

    def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, signal: Signal) -> None:
        blocks = max(1, min(MOST_BLOCKS, -(-x.nbytes // (VECTOR * THREADS))))
        arguments = (
            _address(x), ctypes.c_longlong(x.nbytes), _address(target), _address(ticket), _address(signal.flags),
            _address(signal.values), ctypes.c_int(len(signal.values)), _address(signal.poisoned),
        )  # fmt: skip
        self._launch(b"copy_and_signal", blocks, THREADS, arguments)

    def wait(self, signal: Signal, timeout_ns: int, failed: torch.Tensor) -> None:
        flags, values, poisoned = map(_address, signal)
        arguments = (flags, values, ctypes.c_ulonglong(timeout_ns), poisoned, _address(failed))
        self._launch(b"wait_for_workers", len(signal.values), 1, arguments)

    def _launch(self, name: bytes, blocks: int, threads: int, arguments: tuple[Argument, ...]) -> None:
        # The driver copies the arguments before it returns.
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        done = self._driver.cuLaunchKernel(
            self._functions[name], *grid, *block, 0, stream, ctypes.addressof(addresses), 0
        )
        _checked(done)


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _checked(result: tuple[Any, ...]) -> Any:
    """Returns the value that a call of the bindings gave, None if it gave none. Raises RuntimeError when it failed."""
    status, *found = result
    if int(status):
        raise RuntimeError(f"CUDA says {status!r}")
    return found[0] if found else None
