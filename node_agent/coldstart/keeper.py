"""Starts the CPU LoRA workers, detects their exits at once, and restarts them. It does so in a separate thread. That
one thread starts all of them, since the kernel kills a worker when the thread that started it ends."""

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

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 30.0
STEADY = 30.0
"""Seconds of runtime after which a worker counts as stable. If it exits later, its restart waits only for
FIRST_BACKOFF_S."""
START_LIMIT_S = 120.0
"""Maximum seconds from process start until the worker is warm. The first worker on a machine compiles the operator."""
JOIN_LIMIT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerState:
    """Process of a worker. The keeper's thread sets `ready` and `ended`; the engine's thread sets all other fields
    except `began`."""

    index: int
    epoch: int
    process: subprocess.Popen[bytes]
    pidfd: int
    began: float
    ready: WorkerReady | None = None
    ended: bool = False
    """whether the process was reaped; it then no longer writes to the shared memory"""
    commands: int = 0
    """number of unanswered commands"""
    late: tuple[Callable[[], bool], ...] = ()
    """for each command that timed out, a function that returns whether it was answered since. The worker gets no new
    commands until all were answered."""
    late_since: float = 0.0


@dataclass
class _Place:
    """State of one of the keeper's workers that outlasts restarts of its process."""

    worker: WorkerState | None = None
    backoff: float = FIRST_BACKOFF_S
    restart_at: float = 0.0
    output: bytearray = field(default_factory=bytearray)


class Keeper:
    """Starts and restarts worker processes. `config(index, epoch)` returns the settings of the worker with this index.
    `epoch` counts all processes that were started, from 1. The processes inherit the descriptors `fds`."""

    def __init__(
        self,
        count: int,
        config: Callable[[int, int], WorkerConfig],
        fds: Sequence[int],
        stall_limit: float,
        on_end: Callable[[WorkerState], None],
    ) -> None:
        """`on_end` is called in the keeper's thread with each warm worker that has exited and was reaped."""
        self._config, self._fds, self._stall_limit, self._on_end = config, tuple(fds), stall_limit, on_end
        self._places = [_Place() for _ in range(count)]
        self._epochs = 0
        self.workers: tuple[WorkerState, ...] = ()
        """workers that are warm and not known to have exited, by index; the keeper's thread replaces the tuple"""
        self._closing = False
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="worker-keeper", daemon=True)
        self.deaths = self.restarts = 0

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, count: int, timeout: float) -> int:
        """Waits up to `timeout` seconds until `count` workers are warm. Returns how many are."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.workers) >= count, timeout)
            return len(self.workers)

    def wake(self) -> None:
        """Wakes the keeper's thread, since a worker is late and must be killed if it stays so."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Kills and reaps all workers. They need no orderly shutdown."""
        self._closing = True
        if self._thread.is_alive():
            self.wake()
            self._thread.join(JOIN_LIMIT_S)
        if not self._thread.is_alive():  # else it may still read the descriptor, whose number would be used again
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
        """Starts a worker. On failure (lack of memory, processes or descriptors) schedules another attempt; other
        workers are unaffected."""
        try:
            self._start(index, place)
        except OSError as error:
            log.warning("a worker can't be started", extra={"worker": index, "reason": str(error)})
            self._back_off(place, now)

    @staticmethod
    def _back_off(place: _Place, now: float) -> None:
        place.restart_at = now + place.backoff
        place.backoff = min(2 * place.backoff, MAX_BACKOFF_S)

    def _start(self, index: int, place: _Place) -> None:
        """Starts a worker process. Raises OSError after cleaning up."""
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
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:  # it exited at once: its pidfd reports that
            stream.write(msgspec.json.encode(config))
        place.output.clear()
        place.worker = WorkerState(index, self._epochs, process, pidfd, time.monotonic())

    def _next_look(self, place: _Place, now: float) -> float:
        """Returns the seconds until this worker's process must be checked or restarted."""
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
            place.backoff = FIRST_BACKOFF_S
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
