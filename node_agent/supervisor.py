"""Keeps a node's two processes alive: the API process and the engine. Single-threaded, no torch, no asyncio."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from cluster.logs import set_up_logging
from node_agent.config import ApiProcessConfig, EngineProcessConfig, NodeConfig
from node_agent.cores import SPIN_LIMIT
from node_agent.exit_note import clear_exit, write_exit
from node_agent.gpu.claim import claimed_gpus
from node_agent.gpu.devices import NoGpu
from node_agent.heartbeat import Watch, heartbeat_memory

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
STEADY = 30.0
"""Seconds of runtime after which a process counts as healthy. If it exits later, it is restarted quickly."""
MAX_SILENCE_S = 60.0
"""Seconds without a heartbeat after which an engine is killed, whatever silence it announced."""
LOOK_S = 2.0
"""Seconds between two checks of a heartbeat."""
STOP_SLACK = 3.0
"""Seconds for both processes to exit by themselves, in addition to the time for open streams."""

log = logging.getLogger(__name__)


def run(config: NodeConfig) -> int:
    """Runs the node until SIGTERM or SIGINT, then stops both processes. Returns the exit code: 0, or 1 if the requested
    GPU is not available.

    Must be called on the main thread, whose signal handlers it replaces while it runs. Raises OSError if `run_dir`
    can't be created.
    """
    set_up_logging("supervisor")
    try:
        with claimed_gpus(config.engine) as engine:
            _run_processes(msgspec.structs.replace(config, engine=engine))
    except NoGpu as error:
        log.error("node can't start", extra={"reason": str(error)})
        return 1
    return 0


def _run_processes(config: NodeConfig) -> None:
    run_dir = Path(config.run_dir).absolute()
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    run_dir.chmod(0o700)
    path, parent, heartbeat = str(run_dir / "engine.sock"), os.getpid(), heartbeat_memory()
    children = [
        Child(
            "api",
            "node_agent.api",
            ApiProcessConfig(socket=path, parent=parent, heartbeat=heartbeat, node=config),
            inherited=heartbeat,
        ),
        Child(
            "engine",
            "node_agent.vllm.process" if config.engine.engine == "vllm" else "node_agent.engine_process",
            EngineProcessConfig(
                socket=path,
                parent=parent,
                heartbeat=heartbeat,
                engine=config.engine,
                gateway_url=config.gateway_url,
                secret_file=config.secret_file,
            ),
            on_end=partial(write_exit, run_dir),
            watch=Watch(heartbeat, LOOK_S),
            inherited=heartbeat,
            python=config.engine.vllm.python if config.engine.engine == "vllm" else "",
        ),
    ]
    clear_exit(run_dir)
    with Signals() as signals:
        try:
            while not signals.stop_requested:
                signals.wait(_tend(children))
        finally:
            stop(children, signals, config.stop_seconds + STOP_SLACK)


class Child:
    """Child process with its restarts. It is waiting for its start, running, or ended."""

    def __init__(
        self,
        name: str,
        module: str,
        config: msgspec.Struct,
        output: Path | None = None,
        on_end: Callable[[int], None] | None = None,
        watch: Watch | None = None,
        inherited: int | None = None,
        python: str = "",
    ) -> None:
        """`config` is written as JSON to the process's standard input. Its output is appended to `output`, if given.

        `on_end` receives the exit code (as from subprocess) of each process that exits by itself. A process whose
        heartbeat (`watch`) stops is killed. `inherited`: descriptor that the process gets under the same number.
        `python`: interpreter of another environment, which finds our packages where this one has them; empty: this
        process's own.
        """
        self.name = name
        self._on_end, self._watch = on_end, watch
        self._inherited = () if inherited is None else (inherited,)
        self.failures = 0
        """number of times that the process exited by itself"""
        self._module, self._python = module, python
        self._output = output
        self._config = msgspec.json.encode(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._backoff = FIRST_BACKOFF_S
        self._restart_at = 0.0
        self._told_to_stop = False

    @property
    def pid(self) -> int | None:
        """Process id; None while the process is not running."""
        return None if self._process is None else self._process.pid

    def tend(self, now: float) -> float:
        """Starts the process if its start is due, and reaps it if it has exited. Returns the maximum seconds until the
        next call."""
        if self.reap(now) and self._restart_at <= now:
            self._start(now)
        if self._process is None:
            return max(0.0, self._restart_at - now)
        return STEADY if self._watch is None else self._kill_if_silent(self._watch, self._process, now)

    def reap(self, now: float) -> bool:
        """Returns whether the process is not running. If it has just exited, logs that and schedules its restart."""
        if self._process is None:
            return True
        code = self._process.poll()
        if code is None:
            return False
        if now - self._started >= STEADY:
            self._backoff = FIRST_BACKOFF_S
        self._restart_at = now + self._backoff
        extra = {"child": self.name, "pid": self._process.pid, "code": code, "after": round(now - self._started, 3)}
        if self._told_to_stop:
            as_asked = code in (0, -signal.SIGTERM)
            log.log(logging.INFO if as_asked else logging.WARNING, "child stopped", extra=extra)
            self._process = None
            return True
        log.warning("child ended", extra=extra)
        if self._on_end is not None:
            self._on_end(code)
        self.failures += 1
        self._backoff = min(2 * self._backoff, MAX_BACKOFF_S)
        self._process = None
        return True

    def _kill_if_silent(self, watch: Watch, process: subprocess.Popen[bytes], now: float) -> float:
        """Kills the process if it has been silent too long. Returns the seconds until the next check."""
        silent = watch.silence(now, process.pid)
        if silent >= MAX_SILENCE_S:
            extra = {"child": self.name, "pid": process.pid, "silent": round(silent, 1)}
            log.error("child hangs and is killed", extra=extra)
            process.kill()
        return watch.interval

    def ask_to_stop(self) -> None:
        """Sends SIGTERM. From then on an exit does not count as a failure."""
        self._told_to_stop = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process with SIGKILL and reaps it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, now: float) -> None:
        # own process group: Ctrl-C reaches only this process, which then stops both in order
        command = [self._python or sys.executable, "-m", self._module]
        environment = SPIN_LIMIT | os.environ
        if self._python:
            environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        with self._opened_output() as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                process_group=0,
                pass_fds=self._inherited,
                env=environment,
            )
        self._process, self._started = process, now
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:  # it exited at once: `reap` reports that
            stream.write(self._config)
        log.info("child started", extra={"child": self.name, "pid": process.pid})

    def _opened_output(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        """Returns the file for the process's output; None if it inherits ours. On a disk that takes no file the output
        is dropped: a process without a log is better than none."""
        if self._output is None:
            return contextlib.nullcontext()
        try:
            return self._output.open("ab")
        except OSError as error:
            log.error("child runs without a log", extra={"child": self.name, "problem": str(error)})
            return open(os.devnull, "ab")


class Signals:
    """Context with signal handlers: SIGTERM and SIGINT request a stop, SIGCHLD only ends a wait. Restores the previous
    handlers."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def __init__(self) -> None:
        self.stop_requested = 0
        """number of SIGTERM and SIGINT signals received"""

    def __enter__(self) -> Signals:
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._before = {number: signal.signal(number, self._record_signal) for number in self.NUMBERS}
        self._before_fd = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._before_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._wake.close()
        self._woken.close()

    def wait(self, seconds: float) -> None:
        """Waits up to `seconds` for a signal."""
        select.select([self._wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _record_signal(self, number: int, _frame: object) -> None:
        self.stop_requested += number != signal.SIGCHLD


def _tend(children: list[Child]) -> float:
    now = time.monotonic()
    return min(child.tend(now) for child in children)


def stop(children: list[Child], signals: Signals, grace: float) -> None:
    """Stops the children in order, the API process first, since its streams need the engine. After `grace` seconds in
    all, or on another SIGTERM or SIGINT, kills those still running."""
    deadline = time.monotonic() + grace
    signals_before = signals.stop_requested
    for child in children:
        child.ask_to_stop()
        for now in _ticks(deadline):
            if child.reap(now) or signals.stop_requested > signals_before:
                break
            signals.wait(deadline - now)
    for child in children:
        child.kill()
    log.info("node stopped")


def _ticks(deadline: float) -> Iterator[float]:
    while (now := time.monotonic()) < deadline:
        yield now
