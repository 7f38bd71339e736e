"""Starts the CPU LoRA workers, notices their ends at once, and starts them again, in a separate thread.

The thread spawns all of them, for the kernel ends a worker with the very thread that started it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

import msgspec

from node_agent.coldstart.shared import WorkerConfig, WorkerReady

FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 30.0
STEADY = 30.0
"""Seconds after which a worker counts as good again: its next restart waits for FIRST_BACKOFF only."""
START_LIMIT_S = 120.0
"""Seconds from the start of a process until it is warm; the first one of a machine compiles the operator."""
JOIN_LIMIT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerState:
    """Process of a worker. `ready` and `ended` are set by the keeper, all else but `began` by the engine's thread."""

    index: int
    epoch: int
    process: subprocess.Popen[bytes]
    pidfd: int
    began: float
    ready: WorkerReady | None = None
    ended: bool = False
    """reaped: it writes nothing any more"""
    commands: int = 0
    """number of commands without an answer"""
    late: tuple[Callable[[], bool], ...] = ()
    """checks for an answer, one for each command that timed out; the worker gets no new ones before"""
    late_since: float = 0.0


@dataclass
class _Place:
    """A worker's index over its processes."""

    worker: WorkerState | None = None
    backoff: float = FIRST_BACKOFF
    restart_at: float = 0.0
    output: bytearray = field(default_factory=bytearray)


class Keeper:
    """`config(index, epoch)` is what a worker is started with; `fds` are passed on. Epochs count from 1."""

    def __init__(
        self,
        count: int,
        config: Callable[[int, int], WorkerConfig],
        fds: Sequence[int],
        stall_limit: float,
        on_end: Callable[[WorkerState], None],
    ) -> None:
        """`on_end` receives each worker that was warm and has ended, once it is reaped, in the keeper's thread."""
        self._config, self._fds, self._stall_limit, self._on_end = config, tuple(fds), stall_limit, on_end
        self._places = [_Place() for _ in range(count)]
        self._epochs = 0
        self.workers: tuple[WorkerState, ...] = ()
        """Workers that are warm and alive, as far as is known, by index; replaced whole by the keeper's thread."""
        self._closing = False
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="worker-keeper", daemon=True)
        self.deaths = self.restarts = 0

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, count: int, timeout: float) -> int:
        """Waits until `count` workers are warm, or `timeout` seconds have passed. Returns how many are warm."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.workers) >= count, timeout)
            return len(self.workers)

    def wake(self) -> None:
        """A worker is late: wake, to end it if it stays so."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Kill and reap all. They own nothing that would have to be put in order."""
        self._closing = True
        if self._thread.is_alive():
            self.wake()
            self._thread.join(JOIN_LIMIT_S)
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._closing:
                now = time.monotonic()
                for index, place in enumerate(self._places):
                    if place.worker is None and place.restart_at <= now:
                        self._try_start(index, place, now)
                self._wait(min(self._next_look(place, now) for place in self._places))
                for place in self._places:
                    self._tend(place)
        finally:
            for place in self._places:
                if place.worker is not None:
                    place.worker.process.kill()
                    self._reap(place, place.worker)

    def _try_start(self, index: int, place: _Place, now: float) -> None:
        """The host may be short of memory, processes or descriptors for a while: the others work on."""
        try:
            self._start(index, place)
        except OSError as error:
            log.warning("a worker can't be started", extra={"worker": index, "reason": str(error)})
            self._back_off(place, now)

    @staticmethod
    def _back_off(place: _Place, now: float) -> None:
        place.restart_at = now + place.backoff
        place.backoff = min(2 * place.backoff, LONGEST_BACKOFF)

    def _start(self, index: int, place: _Place) -> None:
        """Raises OSError, and leaves nothing then."""
        self._epochs += 1
        config = self._config(index, self._epochs)
        process = subprocess.Popen(
            [sys.executable, "-m", "node_agent.coldstart.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self._fds,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            with process:
                process.kill()
            raise
        self.restarts += self._epochs > len(self._places)
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:  # it ended at once: its pidfd says so
            stream.write(msgspec.json.encode(config))
        place.output.clear()
        place.worker = WorkerState(index, self._epochs, process, pidfd, time.monotonic())

    def _next_look(self, place: _Place, now: float) -> float:
        """Returns the seconds until the place is to be looked at again."""
        worker = place.worker
        if worker is None:
            return place.restart_at - now
        if worker.ready is None:
            return worker.began + START_LIMIT_S - now
        return worker.late_since + self._stall_limit - now if worker.late else STEADY

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for place in self._places:
            if place.worker is not None:
                poll.register(place.worker.pidfd, select.POLLIN)
                if place.worker.ready is None:
                    poll.register(_output(place.worker), select.POLLIN)
        poll.poll(max(0.0, min(seconds, STEADY)) * 1e3 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _tend(self, place: _Place) -> None:
        worker, now = place.worker, time.monotonic()
        if worker is None:
            return
        if worker.ready is None:
            self._read_ready(place, worker)
            if worker.ready is None and now - worker.began >= START_LIMIT_S:
                self._end(worker, "not ready in time")
        elif worker.late and now - worker.late_since >= self._stall_limit and not all(done() for done in worker.late):
            self._end(worker, "stalled")
        if worker.process.poll() is not None:
            self._record_end(place, worker, now)

    def _read_ready(self, place: _Place, worker: WorkerState) -> None:
        chunk = _output(worker).read(1 << 12)
        place.output += chunk or b""
        if b"\n" in place.output:
            ready = msgspec.json.decode(place.output, type=WorkerReady)
            with self._changed:
                worker.ready = ready
                self._list_workers()
            log.info("worker ready", extra={"worker": worker.index, "pid": worker.process.pid})

    def _list_workers(self) -> None:
        workers = (place.worker for place in self._places)
        self.workers = tuple(worker for worker in workers if worker is not None and worker.ready and not worker.ended)
        self._changed.notify_all()

    def _end(self, worker: WorkerState, why: str) -> None:
        log.warning("worker killed", extra={"worker": worker.index, "pid": worker.process.pid, "reason": why})
        worker.process.kill()
        worker.process.wait(JOIN_LIMIT_S)

    def _record_end(self, place: _Place, worker: WorkerState, now: float) -> None:
        self.deaths += 1
        if now - worker.began >= STEADY:
            place.backoff = FIRST_BACKOFF
        self._back_off(place, now)
        self._reap(place, worker)
        extra = {"worker": worker.index, "pid": worker.process.pid, "code": worker.process.returncode}
        log.warning("worker ended", extra=extra)

    def _reap(self, place: _Place, worker: WorkerState) -> None:
        worker.process.wait(JOIN_LIMIT_S)
        with self._changed:
            worker.ended = True
            self._list_workers()
        if worker.ready is not None:
            self._on_end(worker)
        os.close(worker.pidfd)
        _output(worker).close()
        place.worker = None


def _output(worker: WorkerState) -> IO[bytes]:
    assert worker.process.stdout is not None
    return worker.process.stdout
