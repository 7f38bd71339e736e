"""The engine's side of CPU-assisted LoRA (Toppings 4.2): hands x to worker processes and gets scale * x A B back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from kernels.handoff import Flags, flag_value
from node_agent.adapter_memory.host_map import HostMap
from node_agent.coldstart.keeper import Keeper, WorkerState
from node_agent.coldstart.shared import ECHO, GROUP_NAMES, HandoffMemory, Layout, make_memory
from node_agent.coldstart.worker import load_flags
from node_agent.coldstart.worker_process import WorkerConfig

WAIT_LIMIT_S = 1.0
"""For a worker's answer; a slice takes a hundredth of it."""
STALL_LIMIT_S = 5.0
"""A worker that answers nothing for so long after a time-out is killed and started again."""
CHECK_NS = 200_000
"""Between two looks at whether the awaited worker lives."""


@dataclass(frozen=True)
class Counters:
    handoffs: int
    timeouts: int
    """handoffs whose wait ended by its limit"""
    deaths: int
    """worker processes that ended by themselves or were killed"""
    restarts: int
    quarantined: int
    """slots that were closed before all their workers had answered"""
    in_quarantine: int
    """of these, how many still are"""


@dataclass(slots=True, eq=False)
class Part:
    """One worker's slice of a handoff."""

    worker: WorkerState
    flag: int
    """address of the done flag"""
    value: int
    at: int
    """command, among the worker's"""


class WorkerPool:
    """One worker per core of `cores`, which must be none of the engine's (cores.spare_cores). Made before CUDA is
    touched; all but `close` is for one thread."""

    def __init__(self, host: HostMap, layout: Layout, cores: Sequence[int], stall_limit: float = STALL_LIMIT_S) -> None:
        """`layout.workers` must be len(cores). Raises ValueError, UnsupportedMachine."""
        if len(cores) != layout.workers or len(set(cores)) != len(cores):
            raise ValueError(f"{layout.workers} workers need as many cores, not {list(cores)}")
        if host.torch_dtype is not layout.torch_dtype:
            raise ValueError("the host pool and the handoffs must have one dtype")
        self._flags: Flags = load_flags()
        self.layout, self._host, self._cores = layout, host, list(cores)
        self.all_cores = os.sched_getaffinity(0)
        """of whoever makes the workers"""
        self._fd = make_memory(layout)
        self.memory = HandoffMemory(self._fd, layout)
        self._armed_fds = [os.eventfd(0, os.EFD_CLOEXEC) for _ in cores]
        fds = (self._fd, host.pool_fd, host.table_fd, *self._armed_fds)
        self._keeper = Keeper(len(cores), self._worker_config, fds, stall_limit, self._worker_ended)
        self._free = list(range(layout.slots))
        self._quarantine: list[tuple[int, list[Part]]] = []
        self._sequence = self._armed = self._handoffs = self._timeouts = self._quarantined = 0
        self._closed = False
        self._x_bytes = layout.x_bytes

    def start(self) -> None:
        """Begin to start the workers; they warm up while the caller goes on."""
        self._keeper.start()

    def wait_ready(self, timeout: float, count: int | None = None) -> int:
        """Waits until all (or `count`) workers are warm, or `timeout` seconds have passed. Returns how many are
        warm."""
        return self._keeper.wait_ready(len(self._cores) if count is None else count, timeout)

    @property
    def other_cores(self) -> set[int]:
        """Returns the cores on which an engine should stay while there are workers: all that are not the workers'; all
        where those are none."""
        return self.all_cores - set(self._cores) or self.all_cores

    @property
    def usable(self) -> int:
        """Workers that would take a slice now."""
        return sum(not worker.late for worker in self._keeper.workers)

    def pids(self) -> list[int]:
        """Returns the process ids of the workers that are warm."""
        return [worker.process.pid for worker in self._keeper.workers]

    def arm(self) -> None:
        """Have the workers poll. Each `arm` needs its `disarm`."""
        self._armed += 1
        if self._armed == 1:
            self._flags.post(self.memory.armed, 1)
            for fd in self._armed_fds:
                os.eventfd_write(fd, 1)

    def disarm(self) -> None:
        """After the last one workers answer what is posted, and sleep."""
        self._armed -= 1
        if not self._armed:
            self._flags.post(self.memory.armed, 0)

    def open(self, x: torch.Tensor, host_slot: int, layer: int, group: str | None, slice_tokens: int) -> Handoff | None:
        """Let workers compute the group's part for x [T, d_in], in slices of about `slice_tokens` tokens, one worker
        each: ceil(T / slice_tokens) of them or as many as are free; when all are busy, those with the least to do.

        `group` None: the workers answer at once and compute nothing. None: no slot is free or no worker is there.
        Raises ValueError for an x that doesn't fit, RuntimeError when the workers aren't armed.
        """
        code, tokens = ECHO if group is None else GROUP_NAMES.index(group), x.shape[0]
        self._check(x, host_slot, layer, code, slice_tokens)
        self._sweep()
        workers = self._choose(-(-tokens // slice_tokens))
        if not workers or not self._free:
            return None
        slot = self._free.pop()
        self.memory.x(slot, tokens, x.shape[1]).copy_(x)
        parts = []
        for i, worker in enumerate(workers):
            begin, end = tokens * i // len(workers), tokens * (i + 1) // len(workers)
            parts.append(self._post(slot, worker, (host_slot, layer, code, begin, end, tokens, self.layout.dtype)))
        self._handoffs += 1
        return Handoff(self, slot, parts, () if group is None else self.memory.y(slot, tokens, self._widths(code)))

    def begin_pass(self) -> PassHandoffs | None:
        """Opens the handoffs of one cold pass; a subclass may return None, when no slot is free."""
        return HostPass(self)

    def poll(self) -> None:
        """Free what was late and is not any more."""
        self._sweep()

    def reads(self, parts: Iterable[Part]) -> bool:
        """Whether the worker of any of the parts, which were abandoned, may still be at it."""
        late = [part for _, waiting in self._quarantine for part in waiting]
        return bool(late) and any(part in late for part in parts)

    def counters(self) -> Counters:
        self._sweep()
        keeper = self._keeper
        counted = (self._handoffs, self._timeouts, keeper.deaths, keeper.restarts, self._quarantined)
        return Counters(*counted, len(self._quarantine))

    def close(self) -> None:
        """End the workers. Open handoffs fail; the memory goes with the last view of it."""
        if not self._closed:
            self._closed = True
            self._keeper.close()
            for fd in (self._fd, *self._armed_fds):
                os.close(fd)

    def _worker_ended(self, worker: WorkerState) -> None:
        """Called by the keeper's thread. Whoever awaits the worker here looks by itself whether it has ended."""

    def _worker_config(self, index: int, epoch: int) -> WorkerConfig:
        return WorkerConfig(
            os.getpid(), index, self._cores[index], epoch, self._fd, self._armed_fds[index], self.layout, self._host
        )

    def _widths(self, code: int) -> tuple[int, ...]:
        return self.memory.group_widths[code][1]

    def _check(self, x: torch.Tensor, host_slot: int, layer: int, code: int, slice_tokens: int) -> None:
        layout = self.layout
        d_in = x.shape[-1] if code == ECHO else self.memory.group_widths[code][0]
        if x.dim() != 2 or x.dtype is not layout.torch_dtype or x.shape[1] != d_in:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; {layout.torch_dtype} [T, {d_in}] is needed")
        if not 1 <= x.shape[0] <= layout.max_tokens or x.nbytes > self._x_bytes or slice_tokens < 1:
            raise ValueError(f"{x.shape[0]} tokens in slices of {slice_tokens}: 1 to {layout.max_tokens} are possible")
        if not (0 <= host_slot < self._host.slots and 0 <= layer < self._host.layers):
            raise ValueError(f"the host table has no slot {host_slot}, layer {layer}")
        if not self._armed:
            raise RuntimeError("handoffs are opened between arm() and disarm() only: nobody would look")

    def _choose(self, most: int) -> list[WorkerState]:
        able = [worker for worker in self._keeper.workers if not worker.late]
        free = [worker for worker in able if not worker.commands]
        return free[:most] if free else sorted(able, key=lambda worker: worker.commands)[:most]

    def write(self, at: int, worker: WorkerState, command: tuple[int, int, int, int, int, int, int]) -> Part:
        """Writes the command that the worker carries out once its command flag `at` has the part's value; leaves the
        flag to the caller."""
        self._sequence += 1
        value = flag_value(worker.epoch, self._sequence)
        self.memory.write_command(at, worker.index, (value, *command))
        worker.commands += 1
        return Part(worker, self.memory.done_flags[at][worker.index], value, at)

    def _post(self, slot: int, worker: WorkerState, command: tuple[int, int, int, int, int, int, int]) -> Part:
        part = self.write(slot * self.layout.steps, worker, command)
        self._flags.post(self.memory.command_flags[part.at][worker.index], part.value)
        return part

    def _answered(self, part: Part) -> bool:
        return bool(self._flags.wait(part.flag, part.value, 0))

    def _await(self, part: Part, end_ns: int) -> bool:
        """Whether its worker answered before it ended and before `end_ns`, monotonic."""
        while not self._flags.wait(part.flag, part.value, CHECK_NS):
            if part.worker.ended:
                return self._answered(part)
            if time.monotonic_ns() >= end_ns:
                self._timeouts += 1
                return False
        return True

    def _release(self, slot: int, parts: list[Part], arrived: bool) -> None:
        """The slot is free as soon as nobody writes to it any more."""
        waiting = [part for part in parts if not self._settle(part, arrived)]
        if not waiting:
            self._free.append(slot)
            return
        self._quarantined += 1
        self._quarantine.append((slot, waiting))
        for part in waiting:
            part.worker.late_since = time.monotonic()
            part.worker.late = (*part.worker.late, partial(self._answered, part))
        self._keeper.look()

    def _settle(self, part: Part, arrived: bool = False) -> bool:
        """Whether the part's worker is through with the slot."""
        if not arrived and not self._answered(part) and not part.worker.ended:
            return False
        part.worker.commands -= 1
        return True

    def _sweep(self) -> None:
        """Free quarantined slots whose workers have answered or ended."""
        if not self._quarantine:
            return
        kept = []
        for slot, parts in self._quarantine:
            waiting = [part for part in parts if not self._settle(part)]
            if waiting:
                kept.append((slot, waiting))
            else:
                self._free.append(slot)
        self._quarantine = kept
        for worker in self._keeper.workers:
            worker.late = tuple(answered for answered in worker.late if not answered())


class PassHandoffs(Protocol):
    """One cold pass's handoffs: the part that differs between a CPU and a device with a stream (stream.py)."""

    @property
    def failed(self) -> bool:
        """A worker did not answer a handoff; on a device with a stream it is certain once the pass has ended there."""

    def open(self, x: torch.Tensor, host_slot: int, layer: int, group: str | None, slice_tokens: int) -> Any:
        """Does what `WorkerPool.open` does: returns a handoff with `wait`, `outputs` and `close`, or None."""

    def end(self) -> None:
        """The pass opens no more."""

    @property
    def quiet(self) -> bool:
        """It has ended, and no worker reads anything for it any more, as far as the last `poll` knows."""


class HostPass:
    """Handoffs of an engine that computes on a CPU: each is awaited by its caller, who sees there how it went."""

    failed = False

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._opened: list[Handoff] = []
        self._ended = False

    def open(self, x: torch.Tensor, host_slot: int, layer: int, group: str | None, slice_tokens: int) -> Handoff | None:
        handoff = self._pool.open(x, host_slot, layer, group, slice_tokens)
        if handoff is not None:
            self._opened.append(handoff)
        return handoff

    def end(self) -> None:
        self._ended, self._opened = True, [handoff for handoff in self._opened if not handoff._arrived]

    @property
    def quiet(self) -> bool:
        return self._ended and not any(self._pool.reads(handoff._parts) for handoff in self._opened)


class Handoff:
    """One projection group's adapter part, being computed. A worker that times out or dies fails it."""

    def __init__(self, pool: WorkerPool, slot: int, parts: list[Part], outputs: tuple[torch.Tensor, ...]) -> None:
        self._pool, self._slot, self._parts, self._outputs = pool, slot, parts, outputs
        self._arrived: bool | None = None
        self._open = True

    def wait(self, timeout: float = WAIT_LIMIT_S) -> bool:
        """Waits until all slices have arrived, `timeout` seconds at most. Returns False when they have not; at once
        when a worker has ended. Later calls return the same."""
        if self._arrived is None:
            end_ns = time.monotonic_ns() + int(timeout * 1e9)
            self._arrived = all(self._pool._await(part, end_ns) for part in self._parts)
        return self._arrived

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """[T, d_out] per projection: views, valid after a `wait` that was True and until `close`."""
        if not (self._arrived and self._open):
            raise RuntimeError("a handoff's outputs are there between a successful wait and its close only")
        return self._outputs

    def close(self) -> None:
        """Nobody reads `outputs` any more. Before all workers have answered, this abandons the handoff."""
        if self._open:
            self._open = False
            self._outputs = ()
            self._pool._release(self._slot, self._parts, bool(self._arrived))
