"""The device's side of a handoff, on its stream: hand x over and signal, wait for the answer. Triton 3.9 and later.

Memory order, on top of that of `handoff`. Every program stores its part of x; the barrier orders its threads' stores
before the ticket, which is a release (and acquire) at device scope; the last program's ticket thus happens after all
parts were stored, and what it then does, a release store of each command flag at system scope, makes all of them
visible to the host thread that acquires the flag. The commands themselves the host wrote before it launched. The
waiting kernel acquires the done flags at system scope; kernels after it on the stream see what the workers wrote.

The last program's threads each store one worker's flag: the barrier before that carries the ticket's order to them.

A worker never needs anything from this device, so a wait can't be part of a circle; it is bounded all the same. A wait
that times out sets `poisoned`, and what follows in the pass neither signals nor waits: its rows must not be used.
Neither kernel may run in a captured graph. The memory is the handoff memory, registered with CUDA by the process that
launches. Compiled for GPUs, and run by Triton's interpreter alone: the H100 of gpu_suite.json had Triton 3.6, so the
kernels of handoff_cuda ran there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.handoff import LINE
from kernels.handoff_device import Signal

WORDS = tl.constexpr(LINE // 8)
BLOCK = 1024
UNALIGNED = ("poisoned",)
"""One word of many, each a pass's own: a kernel compiled for its alignment would serve some passes, and the others'
first handoff would wait for a compiler."""


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def copy_and_signal(
    x, size, target, ticket, command_flags, values, workers, poisoned, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """Copies target[0..size) = x[0..size), then sets command_flags[w] = values[w] for every worker w whose value is not
    0; flags and values lie a line apart. Does nothing where poisoned[0] is set. ticket i32[1] is 0 before and after."""
    if tl.load(poisoned) == 0:  # kernels before this one wrote it: all programs see the same
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(x + at, mask=at < size), mask=at < size)
        tl.debug_barrier()
        if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            tl.store(ticket, 0)
            worker = tl.arange(0, LANES)
            value = tl.load(values + worker * WORDS, mask=worker < workers, other=0)
            tl.debug_barrier()
            tl.atomic_store(command_flags + worker * WORDS, value, mask=value != 0, sem="release", scope="sys")


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def wait_for_workers(done_flags, values, timeout_ns, poisoned, failed):
    """Waits in a program per worker: poisoned[0] = failed[0] = 1 unless its done flag becomes its value within
    timeout_ns; value 0, or poisoned already: no wait."""
    worker = tl.program_id(0)
    value = tl.load(values + worker * WORDS)
    if value != 0:  # noqa: SIM102 - no short circuit in Triton
        if tl.load(poisoned) == 0:
            arrived = tl.atomic_poll(
                done_flags + worker * WORDS, value, sem="acquire", scope="sys", timeout_ns=timeout_ns
            )
            if not arrived:
                tl.store(poisoned, 1)
                tl.store(failed, 1)


class TritonKernels:
    """Implements StreamKernels by Triton. In its interpreter there is no stream: each kernel runs in the caller, at
    once."""

    def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, signal: Signal) -> None:
        flags, values, poisoned = signal
        workers = len(values)
        lanes = triton.next_power_of_2(workers)
        copy_and_signal[(triton.cdiv(x.numel(), BLOCK),)](
            x, x.numel(), target, ticket, flags, values, workers, poisoned, BLOCK=BLOCK, LANES=lanes
        )

    def wait(self, signal: Signal, timeout_ns: int, failed: torch.Tensor) -> None:
        flags, values, poisoned = signal
        wait_for_workers[(len(values),)](flags, values, timeout_ns, poisoned, failed)
