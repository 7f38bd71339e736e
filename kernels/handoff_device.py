"""The device's side of a handoff: kernels of handoff.cu on a CUDA stream.

NVRTC compiles them, and the driver API launches them.

Memory order, in addition to that of `handoff`: Each block stores its part of x. Each block then takes a ticket from a
counter, with release and acquire order at device scope. A barrier orders the stores of the block's threads before the
ticket. The block with the last ticket thus continues after all parts are stored. The barrier after the ticket carries
that order to the block's threads, which store one worker's command flag each, with release order at system scope. A
host thread that acquires the flag sees all parts. The host wrote the commands before it launched. The waiting kernel
acquires the done flags at system scope; kernels after it on the stream see the workers' results.

A worker needs nothing from this device, so a wait can't deadlock. It has a timeout nevertheless. A wait that times out
sets `poisoned`. Then the rest of the pass neither signals nor waits, and its rows must not be used. Neither kernel may
run in a captured graph. The flags are in the handoff memory, which the launching process has registered with CUDA. All
supported CUDA builds of torch install cuda.bindings.
"""

from __future__ import annotations

import ctypes
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

import torch

from kernels.build import CompileError

SOURCE, HEADER = "handoff.cu", "handoff_order.h"
THREADS = 256
MAX_BLOCKS = 64
"""Maximum number of blocks, enough to saturate the link to host memory; each takes a ticket."""
VECTOR = 16
Argument = ctypes.c_void_p | ctypes.c_longlong | ctypes.c_ulonglong | ctypes.c_int


class Signal(NamedTuple):
    """Flags of W workers that the device sets or waits for.

    `flags` and `values` are i64[W, 8] in registered host memory. Each worker has a cache line, of which only column 0
    is used.
    """

    flags: torch.Tensor
    values: torch.Tensor
    """new or awaited values of the flags; the flag of a worker with 0 is skipped"""
    poisoned: torch.Tensor
    """i32[1] on the device; not 0 in a pass that has failed"""


class StreamKernels(Protocol):
    """The device's operations of a handoff. Both are enqueued on the current stream and return at once."""

    def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, signal: Signal) -> None:
        """Enqueues target = x, then flags[w] = values[w] for each worker w whose value is not 0.

        x       contiguous, on the device
        target  of x's shape, in registered host memory
        ticket  i32[1] on the device, 0 before and after

        Nothing happens if `poisoned` is set.
        """

    def wait(self, signal: Signal, timeout_ns: int, failed: torch.Tensor) -> None:
        """Makes later work on the stream wait until flags[w] == values[w] for each worker w.

        Workers whose values[w] is 0 are skipped. If `timeout_ns` passes first, the wait ends and sets `poisoned` and
        `failed` to 1. `failed` is i32[1] in registered host memory. If `poisoned` is set already, there is no wait.
        """


def compile_cubin(capability: tuple[int, int]) -> bytes:
    """Returns handoff.cu compiled for a compute capability. Needs no GPU. Raises CompileError."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(f"cuda.bindings, which torch's CUDA builds include, can't be imported: {error}") from error
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
    except (OSError, RuntimeError) as error:  # the library is missing, or older than the bindings
        raise CompileError(f"{SOURCE}: {error}") from error
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


class CudaKernels:
    """StreamKernels implemented in handoff.cu. An object must be created and used by one thread, for one device."""

    def __init__(self, device: torch.device) -> None:
        """Compiles the kernels and loads them on the device. Raises CompileError."""
        cubin = compile_cubin(torch.cuda.get_device_capability(device))
        from cuda.bindings import driver

        torch.zeros(1, device=device)  # makes the device's context current in this thread
        self._device, self._driver = device, driver
        self._module = _checked(driver.cuModuleLoadData(cubin))
        names = (b"copy_and_signal", b"wait_for_workers")
        self._functions = {name: _checked(driver.cuModuleGetFunction(self._module, name)) for name in names}

    def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, signal: Signal) -> None:
        blocks = max(1, min(MAX_BLOCKS, -(-x.nbytes // (VECTOR * THREADS))))
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
        # The arguments may be freed after the call: the driver copies them before it returns.
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
    """Returns the value in a result of cuda.bindings, or None if there is none.

    Raises RuntimeError if the call failed.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA reports {status!r}")
    return values[0] if values else None
