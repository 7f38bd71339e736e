"""The device's side of a handoff, on its stream: hand x over and signal, wait for the answer. Triton 3.9 and later.

Memory order, on top of that of `handoff`. Every program stores its part of x; the barrier orders its threads' stores
before the ticket, which is a release (and acquire) at device scope; the last program's ticket thus happens after all
parts were stored, and what it then does, a release store of each command flag at system scope, makes all of them
visible to the host thread that acquires the flag. The commands themselves the host wrote before it launched. The
waiting kernel acquires the done flags at system scope; kernels after it on the stream see what the workers wrote.

A worker never needs anything from this device, so a wait can't be part of a circle; it is bounded all the same. A wait
that times out sets `poisoned`; the pass runs on, and its rows must not be used. Neither kernel may run in a captured
graph. The memory is the handoff memory, registered with CUDA by the process that launches. Not run on a GPU yet:
compiled for one, and run by Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.handoff import LINE

WORDS = tl.constexpr(LINE // 8)
BLOCK = 1024


@triton.jit
def copy_and_signal(x, size, target, ticket, command_flags, values, workers, BLOCK: tl.constexpr):
    """target[0..size) = x[0..size), then command_flags[w] = values[w] for every worker w whose value is not 0; flags
    and values lie a line apart. ticket i32[1] is 0 before and after."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(x + at, mask=at < size), mask=at < size)
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        for worker in range(workers):
            value = tl.load(values + worker * WORDS)
            if value != 0:
                tl.atomic_store(command_flags + worker * WORDS, value, sem="release", scope="sys")


@triton.jit
def wait_for_workers(done_flags, values, timeout_ns, poisoned):
    """A program per worker: poisoned[0] = 1 unless its done flag becomes its value within timeout_ns; value 0: no
    wait."""
    worker = tl.program_id(0)
    value = tl.load(values + worker * WORDS)
    if value != 0:
        arrived = tl.atomic_poll(done_flags + worker * WORDS, value, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        if not arrived:
            tl.store(poisoned, 1)


def launch_copy_and_signal(
    x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, command_flags: torch.Tensor, values: torch.Tensor
) -> None:
    """Enqueue it. x and target contiguous, of one shape; ticket i32[1] on x's device; command_flags and values
    i64[workers, 8], registered host memory, of which column 0 counts."""
    grid = (triton.cdiv(x.numel(), BLOCK),)
    copy_and_signal[grid](x, x.numel(), target, ticket, command_flags, values, len(values), BLOCK=BLOCK)


def launch_wait(done_flags: torch.Tensor, values: torch.Tensor, timeout_ns: int, poisoned: torch.Tensor) -> None:
    """Enqueue it. done_flags and values i64[workers, 8]; poisoned i32[1] on the device."""
    wait_for_workers[(len(values),)](done_flags, values, timeout_ns, poisoned)
