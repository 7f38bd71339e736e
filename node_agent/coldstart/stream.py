"""Handoffs from a GPU: enqueued between the base's products, and awaited only on the device's stream.

A cold pass owns a slot of the handoff memory. Each of its handoffs uses one of the slot's steps, which has memory for
the commands and flags of all workers (shared.py). The host writes the commands when it enqueues the handoff. The x and
y areas are used by successive handoffs, in the order of the stream. On the stream, x is copied to the x area and the
workers' flags are set. Then the base's product runs. After a bounded wait for the workers, their results are copied to
the device and added. A failed wait sets a word that the host may read once the pass's last event has ended. Only then
may the slot's memory be reused.

If a worker exits, the keeper answers for it at once: the stream stalls only until the exit is noticed, and the pass
fails. `WAIT_LIMIT_S` bounds the wait for a live worker. No other worker takes over a slice, since the stream has moved
on before a failure can be noticed. A spare worker serves the next pass.

After a failed wait, later handoffs of the pass neither signal nor wait, so their commands never reach a worker. Slots
with commands that were signalled are not reused until their workers have answered or exited, as on a CPU.

The kernels run on any device. On a CPU (Triton's interpreter) the calls are synchronous, and all events have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from kernels.handoff import SEQUENCE_BITS
from kernels.handoff_device import Signal, StreamKernels
from node_agent.adapter_memory.host_map import HostMap
from node_agent.adapter_memory.pinned import Pinned
from node_agent.coldstart.handoffs import WAIT_LIMIT_S, Part
from node_agent.coldstart.keeper import WorkerState
from node_agent.coldstart.shared import ECHO, GROUP_NAMES, HandoffMemory, Layout
from node_agent.coldstart.slices import Segment, slices_wanted, weight_shares
from node_agent.coldstart.workers import STALL_LIMIT_S, WorkerPool
from node_agent.device import record_event
from node_agent.device_event import Event


class BrokenHandoff(RuntimeError):
    """Raised when a handoff's bytes arrived changed, so that handoffs can't be used on this device."""


class StreamPool(WorkerPool):
    """Workers of an engine on `device`. It uses one stream: the current stream of the calling thread."""

    def __init__(
        self,
        host: HostMap,
        layout: Layout,
        cores: Sequence[int],
        device: torch.device,
        kernels: StreamKernels,
        stall_limit: float = STALL_LIMIT_S,
        wait_limit: float = WAIT_LIMIT_S,
    ) -> None:
        """Up to `layout.slots` passes may hold a slot at once, ended ones with late workers included. Each pass may
        open `layout.steps` handoffs. Raises ValueError, UnsupportedMachine, or RuntimeError when CUDA can't pin the
        memory."""
        super().__init__(host, layout, cores, stall_limit)
        self.device, self.kernels, self.wait_ns = device, kernels, int(wait_limit * 1e9)
        self._pinned = Pinned(_ranges(self.memory)) if device.type == "cuda" else None
        self.poisoned = torch.zeros(layout.slots, dtype=torch.int32, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self.answer = torch.empty(
            layout.y_bytes // layout.torch_dtype.itemsize, dtype=layout.torch_dtype, device=device
        )
        """device buffer to which the workers' results are copied; one is enough, since there is one stream"""
        self.failed = [self.memory.failed(slot) for slot in range(layout.slots)]
        self.lines = [
            tuple(
                self.memory.lines(offset(at, 0)) for offset in (layout.command_flag, layout.command, layout.done_flag)
            )
            for at in range(layout.commands)
        ]
        """tensors i64[processes, 8] for each command: its flags, its commands (whose first word is the flag's value)
        and its done flags"""
        self._ending: list[StreamPass] = []
        self._disarming: list[Event] = []

    def begin_pass(self) -> StreamPass | None:
        """Allocates a free slot for a new pass. Returns None when none is free."""
        self.poll()
        return StreamPass(self, self._free.pop()) if self._free else None

    def disarm(self) -> None:
        """Disarms the workers after the device has signalled all handoffs enqueued so far."""
        self._disarming.append(record_event(self.device))
        self.poll()

    def poll(self) -> None:
        """Disarms workers, and frees slots of ended passes, where the device has reached the events they wait for."""
        disarming, self._disarming = self._disarming, []
        for event in disarming:
            if event.query():
                super().disarm()
            else:
                self._disarming.append(event)
        ending, self._ending = self._ending, []
        for one in ending:
            if one.ended is not None and one.ended.query():
                self._free_slot(one)
            else:
                self._ending.append(one)
        super().poll()

    def check(self) -> None:
        """Sends random rows and compares what arrives, before any request uses handoffs. Workers must be warm.

        Raises BrokenHandoff.
        """
        layout = self.layout
        width = max(d_in for d_in, _ in layout.widths)
        generator = torch.Generator().manual_seed(0)
        self.arm()
        try:
            for tokens in sorted({1, 3, layout.max_tokens}):
                x = torch.randn(tokens, width, generator=generator).to(layout.torch_dtype)
                one = self.begin_pass()
                segment = Segment(0, tokens, max(1, tokens // layout.workers))
                handoff = one.open(x.to(self.device), [segment], 0, None) if one else None
                if one is None or handoff is None:
                    raise BrokenHandoff("no CPU worker takes a handoff")
                handoff.wait()
                one.end()
                assert one.ended is not None
                one.ended.synchronize()
                if one.failed:
                    raise BrokenHandoff("the CPU workers' answer did not reach the device in time")
                if not torch.equal(self.memory.x(one.slot, tokens, width), x):
                    raise BrokenHandoff(f"{tokens} rows differ from those that were sent to the CPU workers")
                self.poll()
        finally:
            self.disarm()

    def close(self) -> None:
        """Waits until the device has finished, then closes the pool. Each enqueued wait is bounded, and after a failed
        one the pass does not wait again."""
        if self._pinned is not None:
            torch.cuda.synchronize(self.device)
            self._disarming.clear()
            self._pinned.close()
            self._pinned = None
        super().close()

    def command(self, at: int, segments: Sequence[Segment], layer: int, code: int, x_bytes: int) -> list[Part]:
        """Writes the commands of handoff `at`, without setting their flags. Workers without a command get the value 0.
        Returns one part for each worker with a command; none if no worker is available."""
        self.lines[at][1][:, 0].zero_()
        # the stream serves one handoff at a time, so a worker that is not late is free by then
        workers = self.available
        shares = weight_shares(segments, len(workers))
        chosen = workers[: shares or slices_wanted(segments)]
        parts = self.write(at, chosen, segments, layer, code, x_bytes, bool(shares)) if chosen else []
        self._handoffs += bool(parts)
        for part in parts:
            if part.worker.ended:  # it exited before the keeper's thread could find the command
                self._worker_ended(part.worker)
        return parts

    def _worker_ended(self, worker: WorkerState) -> None:
        """Answers all of an exited worker's commands by setting its done flags, so that the stream does not wait for
        it. The passes with these commands fail, since the worker has not computed their results."""
        memory, steps = self.memory, self.layout.steps
        for at in range(self.layout.commands):
            value, done = memory.read_command(at, worker.index).value, memory.done_flags[at][worker.index]
            if value >> SEQUENCE_BITS == worker.epoch and not self._flags.wait(done, value, 0):
                self.failed[at // steps].fill_(1)
                self._flags.post(done, value)

    def end_pass(self, one: StreamPass) -> None:
        self._ending.append(one)
        self.poll()

    def _free_slot(self, one: StreamPass) -> None:
        """Frees the slot of a pass that has ended on the device."""
        self._timeouts += one.failed
        if one.awaited == len(one.handoffs) and not one.failed:  # all waits saw their workers' flags
            self.release(one.slot, one.parts, arrived=True)
            return
        signalled = []
        for part in one.parts:
            if self.memory.command_value(part.at, part.worker.index) == part.value:
                signalled.append(part)
            else:
                part.worker.commands -= 1
                self.lines[part.at][1][part.worker.index, 0] = 0  # withdraw the command: nobody will answer it
        self.release(one.slot, signalled, arrived=False)


class StreamPass:
    """Handoffs of one cold pass, in layer order."""

    def __init__(self, pool: StreamPool, slot: int) -> None:
        self.pool, self.slot = pool, slot
        self.handoffs: list[list[Part]] = []
        self.awaited = 0
        self.ended: Event | None = None
        self._poisoned = pool.poisoned[slot : slot + 1]
        self._poisoned.zero_()
        pool.failed[slot].zero_()  # the slot was free, so nothing on the device writes it

    @property
    def parts(self) -> list[Part]:
        return [part for parts in self.handoffs for part in parts]

    @property
    def failed(self) -> bool:
        """Returns whether a worker did not answer in time. False is certain only once the device has finished all work
        of the pass."""
        return bool(self.pool.failed[self.slot].item())

    def open(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, group: str | None) -> StreamHandoff | None:
        """Enqueues a handoff: workers compute the group's LoRA term for x [T, d_in], as in `WorkerPool.open`.

        Returns None if no worker is available, or if the pass has already opened `layout.steps` handoffs.
        """
        pool, step, tokens = self.pool, len(self.handoffs), x.shape[0]
        code = ECHO if group is None else GROUP_NAMES.index(group)
        pool._check(x, segments, layer, code)
        if step == pool.layout.steps:
            return None
        at = self.slot * pool.layout.steps + step
        parts = pool.command(at, segments, layer, code, x.nbytes)
        if not parts:
            return None
        self.handoffs.append(parts)
        flags, commands, _ = pool.lines[at]
        target = pool.memory.x(self.slot, tokens, x.shape[1])
        signal = Signal(flags, commands, self._poisoned)
        pool.kernels.copy_and_signal(x.contiguous(), target, pool.ticket, signal)
        return StreamHandoff(self, at, tokens, () if group is None else pool.memory.group_widths[code][1])

    def wait(self, at: int) -> None:
        """Enqueues the wait for the workers of command `at`."""
        pool = self.pool
        _, commands, done = pool.lines[at]
        pool.kernels.wait(Signal(done, commands, self._poisoned), pool.wait_ns, pool.failed[self.slot])
        self.awaited += 1

    @property
    def quiet(self) -> bool:
        pool = self.pool
        return self.ended is not None and self not in pool._ending and not pool.reads(self.parts)

    def end(self) -> None:
        """Ends the pass: nothing more is enqueued for it."""
        if self.ended is None:
            self.ended = record_event(self.pool.device)
            self.pool.end_pass(self)


class StreamHandoff:
    """LoRA term of one projection group, computed in stream order. `wait` and `outputs` also act in stream order."""

    def __init__(self, one: StreamPass, at: int, tokens: int, widths: tuple[int, ...]) -> None:
        self._pass, self._at, self._tokens, self._widths = one, at, tokens, widths

    def wait(self) -> bool:
        """Enqueues a wait for the workers on the device's stream, and then a copy of their results to the device.

        Work enqueued later finds the results in `outputs`, unless the pass has failed (`StreamPass.failed`). Always
        returns True, since a failure is not known yet when the wait is enqueued.
        """
        self._pass.wait(self._at)
        size = self._tokens * sum(self._widths)
        if size:
            pool = self._pass.pool
            (y,) = pool.memory.y(self._pass.slot, 1, (size,))
            pool.answer[:size].copy_(y.view(-1), non_blocking=True)
        return True

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Outputs [T, d_out] of each projection, on the device. Work enqueued before the next handoff's `wait` may read
        them; that wait overwrites them."""
        sizes = [self._tokens * width for width in self._widths]
        parts = self._pass.pool.answer[: sum(sizes)].split_with_sizes(sizes)
        return [part.view(self._tokens, width) for part, width in zip(parts, self._widths, strict=True)]

    def close(self) -> None:
        """Does nothing, since a later handoff's `wait` is on the same stream as the reads of `outputs`."""


def _ranges(memory: HandoffMemory) -> Iterator[tuple[int, int]]:
    """Yields (address, bytes) of the ranges to pin: the memory before the areas, then each slot's areas. A slot's x and
    y areas are in one range, so that a copy of results never crosses a border."""
    layout = memory.layout
    borders = [0, *(layout.x_area(slot) for slot in range(layout.slots + 1))]
    for begin, end in pairwise(borders):
        yield memory.address + begin, end - begin
