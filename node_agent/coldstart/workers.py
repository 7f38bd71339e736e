"""Engine's side of CPU-assisted LoRA (Toppings 4.2). Sends a group's input x to worker processes, and receives its LoRA
terms scale * x A B."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from kernels.handoff import Flags, flag_value
from node_agent.adapter_memory.host_map import HostMap
from node_agent.coldstart.engine_cores import EngineCores
from node_agent.coldstart.handoff_link import HandoffLink
from node_agent.coldstart.handoffs import Handoff, HostPass, Part, PassHandoffs
from node_agent.coldstart.keeper import Keeper, WorkerState
from node_agent.coldstart.shared import (
    ECHO,
    GROUP_NAMES,
    MAX_SEGMENTS,
    HandoffMemory,
    Layout,
    WorkerConfig,
    make_memory,
)
from node_agent.coldstart.slices import Segment, cut, slices_wanted, weight_shares, within
from node_agent.coldstart.worker import load_flags

TAKEOVER_S = 0.25
"""Seconds without an answer after which another worker, if one is free, also computes the slice."""
STALL_LIMIT_S = 5.0
"""Seconds that a worker has after a timeout to answer. Then it is killed and restarted."""
CHECK_NS = 200_000
"""Nanoseconds between two checks whether a worker whose answer is awaited is alive."""


class WorkerPool:
    """Pool of CPU LoRA workers, one for each core of `cores`. Must be created before CUDA is initialised. One thread
    calls all methods except `close`.

    In addition there are `layout.spares` spare workers, as in Toppings (section 8). A spare is warm, sleeps, and has no
    core to itself. It replaces another worker while that one is dead or late.
    """

    def __init__(
        self,
        host: HostMap,
        layout: Layout,
        cores: Sequence[int],
        stall_limit: float = STALL_LIMIT_S,
        takeover: float = TAKEOVER_S,
    ) -> None:
        """`layout.workers` must be len(cores). Raises ValueError, UnsupportedMachine."""
        if len(cores) != layout.workers or len(set(cores)) != len(cores):
            raise ValueError(f"{layout.workers} workers need as many cores, not {list(cores)}")
        if host.torch_dtype is not layout.torch_dtype:
            raise ValueError("the host pool and the handoffs must have one dtype")
        self._flags: Flags = load_flags()
        self.layout, self._host, self._cores = layout, host, list(cores)
        self._limit = len(self._cores)
        self.engine_cores: EngineCores | None = None
        """Cores that the engine gives up while workers are armed; None: the engine has other cores."""
        self.link: HandoffLink | None = None
        """Simulated link of handoffs; None: a real link, or shared memory."""
        self.fd = make_memory(layout)
        self.memory = HandoffMemory(self.fd, layout)
        self._armed_fds = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(layout.processes)]
        fds = (self.fd, host.pool_fd, host.table_fd, *self._armed_fds)
        self._keeper = Keeper(layout.processes, self._worker_config, fds, stall_limit, self._worker_ended)
        self._free = list(range(layout.slots))
        self._quarantine: list[tuple[int, list[Part]]] = []
        self._sequence = self._armed = self._handoffs = self._timeouts = self._quarantined = self._takeovers = 0
        self._polling: set[int] = set()
        self.takeover_ns = int(takeover * 1e9)
        """nanoseconds without an answer after which another worker also computes the slice"""
        self._closed = False
        self._x_bytes, self._dtype, self._host_dtype = layout.x_bytes, layout.dtype, layout.torch_dtype

    def start(self) -> None:
        """Starts the workers without waiting. They warm up in the background."""
        self._keeper.start()

    def wait_ready(self, timeout: float, count: int | None = None) -> int:
        """Waits up to `timeout` seconds until all (or `count`) workers are warm. Returns how many are."""
        return self._keeper.wait_ready(len(self._cores) if count is None else count, timeout)

    @property
    def limit(self) -> int:
        """Maximum workers that compute at once: one per core, or fewer if fewer are as good. The others sleep, and the
        engine keeps their cores."""
        return self._limit

    @limit.setter
    def limit(self, count: int) -> None:
        self._limit = count
        if self.engine_cores is not None:
            self.engine_cores.leave(self._cores[:count])

    @property
    def rests_between_handoffs(self) -> bool:
        """Returns whether workers are disarmed (stop polling) after each handoff, since the engine computes on their
        cores."""
        return self.engine_cores is not None and self.engine_cores.per_handoff

    @property
    def available(self) -> list[WorkerState]:
        """Returns the workers that can take a slice now, at most `limit`. While another worker is dead or late, they
        include a spare one, which is the last."""
        return [worker for worker in self._keeper.workers if not worker.late][: self.limit]

    @property
    def usable(self) -> int:
        """Returns the number of workers that can take a slice now."""
        return len(self.available)

    def pids(self) -> list[int]:
        """Returns the process ids of the warm workers."""
        return [worker.process.pid for worker in self._keeper.workers]

    def arm(self) -> None:
        """Makes the workers poll for commands. Each `arm` needs one `disarm`."""
        self._armed += 1
        if self._armed == 1:
            if self.engine_cores is not None:
                self.engine_cores.lend()
            for index in range(self._limit):
                self.rouse(index)

    def rouse(self, index: int) -> None:
        """Makes one worker poll for commands until all workers are disarmed."""
        self._polling.add(index)
        self._flags.post(self.memory.armed[index], 1)
        os.eventfd_write(self._armed_fds[index], 1)

    def disarm(self) -> None:
        """Undoes one `arm`. After the last one, the workers answer the commands posted before, and then sleep."""
        if self._closed:
            return
        self._armed -= 1
        if not self._armed:
            for index in self._polling:
                self._flags.post(self.memory.armed[index], 0)
            self._polling.clear()
            if self.engine_cores is not None:
                self.engine_cores.take_back()

    def open(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, group: str | None) -> Handoff | None:
        """Opens a handoff: workers compute the group's LoRA term for x [T, d_in], whose tokens belong to the segments.

        Tokens are divided into slices of the segments' sizes, one for each worker, up to the number of free workers. If
        all workers are busy, the least busy ones are used. If there are fewer slices than free workers, these share the
        weights instead, if the weights are large enough. With `group` None the workers answer without computing.

        Returns None if no handoff slot is free or no worker is available. Raises ValueError for an x of the wrong shape
        or dtype, RuntimeError when the workers are not armed.
        """
        code = ECHO if group is None else GROUP_NAMES.index(group)
        self._check(x, segments, layer, code)
        self._sweep()
        workers, split = self._choose(segments)
        return self._hand_over(x, segments, layer, code, workers, split)

    def take_over(self, parts: Sequence[Part]) -> Handoff | None:
        """Hands a whole slice to another worker, preferably a spare, because `parts` of it are missing. Returns the
        handoff; None if no worker or slot is free."""
        part, missing = parts[0], [part.worker for part in parts]
        candidates = [worker for worker in self._keeper.workers if not worker.late and worker not in missing]
        if not candidates:
            return None
        command = self.memory.read_command(part.at, part.worker.index)
        width = 1 if command.group == ECHO else self.memory.group_widths[command.group][0]
        x = self.memory.x(part.at // self.layout.steps, part.end, width, part.begin)
        tokens = within(self.memory.read_segments(part.at, command.segments), part.begin, part.end)
        segments = [Segment(host_slot, high - low, high - low) for host_slot, low, high in tokens]
        stand_in = min(candidates, key=lambda worker: (worker.commands, -worker.index))
        handoff = self._hand_over(x, segments, command.layer, command.group, [stand_in])
        self._takeovers += handoff is not None
        return handoff

    def begin_pass(self) -> PassHandoffs | None:
        """Opens the handoffs of one cold pass. Subclasses may return None when no slot is free."""
        return HostPass(self)

    def poll(self) -> None:
        """Frees the slots of handoffs that were closed before late workers had answered, if they have answered
        since."""
        self._sweep()

    def reads(self, parts: Iterable[Part]) -> bool:
        """Returns whether a worker may still be processing any of these parts, whose handoffs were closed before they
        were answered."""
        late = [part for _, waiting in self._quarantine for part in waiting]
        return bool(late) and any(part in late for part in parts)

    def close(self) -> None:
        """Ends the workers. Open handoffs fail. The shared memory is unmapped when its last view is freed."""
        if not self._closed:
            self._closed = True
            if self._armed and self.engine_cores is not None:
                self.engine_cores.take_back()
            self._armed = 0
            self._keeper.close()
            for fd in (self.fd, *self._armed_fds):
                os.close(fd)

    def _worker_ended(self, worker: WorkerState) -> None:
        """Hook called in the keeper's thread. It does nothing here: callers that wait for a worker check themselves
        whether it has exited."""

    def _worker_config(self, index: int, epoch: int) -> WorkerConfig:
        cores = tuple(self._cores) if index >= len(self._cores) else (self._cores[index],)
        return WorkerConfig(os.getpid(), index, cores, epoch, self.fd, self._armed_fds[index], self.layout, self._host)

    def _check(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, code: int) -> None:
        shape, max_tokens = x.shape, self.layout.max_tokens
        d_in = shape[-1] if code == ECHO else self.memory.group_widths[code][0]
        if len(shape) != 2 or x.dtype is not self._host_dtype or shape[1] != d_in:
            raise ValueError(f"x is {x.dtype} {tuple(shape)}; {self._host_dtype} [T, {d_in}] is needed")
        if not 1 <= shape[0] <= max_tokens or x.nbytes > self._x_bytes:
            possible = f"1 to {max_tokens} tokens, {self._x_bytes} bytes"
            raise ValueError(f"x has {shape[0]} tokens, {x.nbytes} bytes; {possible} are possible")
        unassigned = shape[0]
        for host_slot, tokens, slice_tokens, _ in segments:
            unassigned -= tokens
            if tokens < 1 or slice_tokens < 1:
                raise ValueError(f"a segment of {tokens} tokens in slices of {slice_tokens}: both must be at least 1")
            if not (0 <= host_slot < self._host.slots and 0 <= layer < self._host.layers):
                raise ValueError(f"the host table has no slot {host_slot}, layer {layer}")
        if unassigned or not 1 <= len(segments) <= MAX_SEGMENTS:
            raise ValueError(
                f"{len(segments)} segments of {shape[0]} tokens; expected 1 to {MAX_SEGMENTS} with all tokens"
            )
        if not self._armed:
            raise RuntimeError("handoffs can be opened only between arm() and disarm(): no worker would notice them")

    def _hand_over(
        self,
        x: torch.Tensor,
        segments: Sequence[Segment],
        layer: int,
        code: int,
        workers: Sequence[WorkerState],
        split: bool = False,
    ) -> Handoff | None:
        if not workers or not self._free:
            return None
        slot, tokens = self._free.pop(), x.shape[0]
        self.memory.x(slot, tokens, x.shape[1]).copy_(x)
        parts = self.write(slot * self.layout.steps, workers, segments, layer, code, x.nbytes, split)
        for part in parts:
            self._flags.post(self.memory.command_flags[part.at][part.worker.index], part.value)
        self._handoffs += 1
        outputs = [] if code == ECHO else self.memory.y(slot, tokens, self.memory.group_widths[code][1])
        return Handoff(self, slot, parts, outputs)

    def _choose(self, segments: Sequence[Segment]) -> tuple[list[WorkerState], bool]:
        """Returns the workers for the segments, and whether they split the weights. Only free workers split them, since
        each waits for the others."""
        workers = self.available
        free = [worker for worker in workers if not worker.commands]
        shares, max_slices = weight_shares(segments, len(free)), slices_wanted(segments)
        if shares:
            return free[:shares], True
        return free[:max_slices] if free else sorted(workers, key=lambda worker: worker.commands)[:max_slices], False

    def write(
        self,
        at: int,
        workers: Sequence[WorkerState],
        segments: Sequence[Segment],
        layer: int,
        code: int,
        x_bytes: int,
        split: bool,
    ) -> list[Part]:
        """Writes the commands of handoff `at` for the workers, or for as many of them as there are slices. Returns
        their parts.

        The caller then sets the command flags: a worker starts once its flag has its part's value. `split`: each worker
        gets all tokens and a share of the weights.
        """
        memory, tokens, ends = self.memory, 0, []
        for segment in segments:
            tokens += segment.tokens
            ends.append((segment.host_slot, tokens))
        memory.write_segments(at, ends)
        crossings = self._crossings(x_bytes, tokens, code)
        parts: list[Part] = []
        shares, tag = (len(workers) if split else 1), self._sequence + 1
        slices = [(0, tokens)] * len(workers) if split or len(workers) == 1 else cut(segments, len(workers))
        for share, (worker, (begin, end)) in enumerate(zip(workers, slices, strict=False)):
            index = worker.index
            if index not in self._polling:
                self.rouse(index)
            self._sequence += 1
            value = flag_value(worker.epoch, self._sequence)
            of_weights = (share if split else 0, shares, tag)
            memory.write_command(
                at, index, (value, layer, code, begin, end, tokens, self._dtype, len(ends), *crossings, *of_weights)
            )
            worker.commands += 1
            parts.append(Part(worker, memory.done_flags[at][index], value, at, begin, end))
        return parts

    def _crossings(self, x_bytes: int, tokens: int, code: int) -> tuple[int, int]:
        """Returns two times in microseconds for crossing the simulated link: that of a handoff's x, and that of its
        results. Both are 0 without a simulated link."""
        if self.link is None:
            return 0, 0
        widths = () if code == ECHO else self.memory.group_widths[code][1]
        return self.link.charge(x_bytes, tokens * sum(widths) * self._host_dtype.itemsize)

    def _answered(self, part: Part) -> bool:
        return bool(self._flags.wait(part.flag, part.value, 0))

    def await_part(self, part: Part, end_ns: int) -> bool:
        """Returns whether the part's worker answers before it exits and before `end_ns` (monotonic)."""
        while not self._flags.wait(part.flag, part.value, CHECK_NS):
            if part.worker.ended:
                return self._answered(part)
            if time.monotonic_ns() >= end_ns:
                return False
        return True

    def record_timeout(self) -> None:
        self._timeouts += 1

    def release(self, slot: int, parts: list[Part], arrived: bool) -> None:
        """Frees the slot once no worker writes to it. `arrived`: all its workers have answered."""
        waiting = [part for part in parts if not self._settle(part, arrived)]
        if not waiting:
            self._free.append(slot)
            return
        self._quarantined += 1
        self._quarantine.append((slot, waiting))
        for part in waiting:
            part.worker.late_since = time.monotonic()
            part.worker.late = (*part.worker.late, partial(self._answered, part))
        self._keeper.wake()

    def _settle(self, part: Part, arrived: bool = False) -> bool:
        """Subtracts the part from its worker's number of commands. Returns False, without effect, while the worker may
        still use the slot."""
        if not arrived and not self._answered(part) and not part.worker.ended:
            return False
        part.worker.commands -= 1
        return True

    def _sweep(self) -> None:
        """Frees the slots of closed handoffs whose late workers have now answered or exited."""
        if not self._quarantine:
            return
        quarantined = []
        for slot, parts in self._quarantine:
            waiting = [part for part in parts if not self._settle(part)]
            if waiting:
                quarantined.append((slot, waiting))
            else:
                self._free.append(slot)
        self._quarantine = quarantined
        for worker in self._keeper.workers:
            worker.late = tuple(answered for answered in worker.late if not answered())
