"""Helper process with low priority and bounded memory that processes untrusted files, one job at a time.

The gateway uses HelperProcess; the functions from `receive` on run in the helper. Messages are sent over a socket in
both directions, each preceded by its length.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
NICENESS = 10
MEMORY_BYTES = 512 << 20
"""Maximum memory of the process in bytes, in addition to its memory at the start."""
KEPT_BYTES = 128 << 20
"""Memory in bytes above which a process is replaced after its work."""
LENGTH_BYTES = 4
"""Size in bytes of the length that precedes each message."""
MAX_ANSWER_BYTES = 64 << 20
GIVEN = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment variables passed to a helper, in addition to Python's. They have no credentials of a store or of
Redis."""
END_SECONDS = 10.0
"""Time that a process may take to exit after it closed its connection."""


class HelperEnded(Exception):
    """The helper process ended during its work. `code` is its exit code, or minus the signal that ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a helper process ended with exit code {code}")
        self.code = code


class HelperProcess:
    """Helper process that runs a module of Garnish. It starts with the first job, and again after it has ended. Methods
    block; only one job may run at a time."""

    def __init__(self, module: str, hello: Callable[[], object] | None = None) -> None:
        """Prepares a process that will run `module`. `hello` returns the first message to each process; None: there is
        none."""
        self._module, self._hello = module, hello
        self.process: subprocess.Popen[bytes] | None = None
        """Latest process; None before the first job."""
        self.connection: socket.socket | None = None

    def ask(self, job: object, seconds: float) -> bytes:
        """Sends a job to the process, and returns its answer. Raises TimeoutError after `seconds`, including the start
        of the process, or HelperEnded. The next job then starts a new process."""
        deadline = time.monotonic() + seconds
        try:
            connection = self._started(seconds)
            connection.settimeout(seconds)
            send(connection, job)
            size = int.from_bytes(_exactly(connection, LENGTH_BYTES, deadline), "little")
            if size > MAX_ANSWER_BYTES:
                raise RuntimeError(f"a helper's answer has {size} bytes")
            return _exactly(connection, size, deadline)
        except (EOFError, ConnectionError):
            raise HelperEnded(self._exit_code()) from None
        except BaseException:
            self.end()
            raise

    def kill(self) -> None:
        """Kills the process and its current job. Safe in any thread."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """Kills the process and closes its connection. The next job starts a new process."""
        self.kill()
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _exit_code(self) -> int:
        """Returns the exit code of a process that closed its connection; kills it if it does not exit."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.end()
        assert self.process.returncode is not None
        return self.process.returncode

    def _started(self, seconds: float) -> socket.socket:
        if self.connection is not None and self.process is not None and self.process.poll() is None:
            return self.connection
        self.end()
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # this interpreter; -P: no module from the working directory
                [sys.executable, "-P", "-m", self._module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is only for the gateway, whose exit ends this process
                env=_environment(),
            )
        self.connection = ours
        ours.settimeout(seconds)
        if self._hello is not None:
            send(ours, self._hello())
        return ours


def _environment() -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name in GIVEN or name.startswith(("PYTHON", "LC_"))
    }
    return inherited | {"OPENBLAS_NUM_THREADS": "1"}


def _exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Returns the next `size` bytes of the connection. `deadline` is in monotonic seconds; None: no deadline. Raises
    TimeoutError, or EOFError when the peer has closed the connection."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(min(1 << 20, size - len(data)))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def send(connection: socket.socket, message: object) -> None:
    """Sends one message: its length, then its msgpack."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


# --- the helper's side


def receive(connection: socket.socket) -> bytes:
    """Returns the next message. Raises EOFError when the gateway has closed the connection."""
    return _exactly(connection, int.from_bytes(_exactly(connection, LENGTH_BYTES), "little"))


def jobs(connection: socket.socket, kind: type[T]) -> Iterator[T]:
    """Yields jobs until the gateway closes the connection."""
    while True:
        try:
            data = receive(connection)
        except EOFError:
            return
        yield msgspec.msgpack.decode(data, type=kind)


@contextmanager
def limited(timer: int, seconds: float) -> Iterator[None]:
    """Runs its block under a timer of the process. After `seconds` the timer's signal, which has no handler, kills the
    process. The timer's earlier setting is restored afterwards."""
    before, _ = signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, before)


def bound_memory() -> None:
    """Limits this process's address space to its current size plus MEMORY_BYTES, and disables core dumps."""
    limit = _memory()[0] + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def holds_much() -> bool:
    """Returns whether the process uses so much memory that a new one should replace it."""
    return _memory()[1] > KEPT_BYTES


def _memory() -> list[int]:
    """Returns the process's address space and resident memory, both in bytes."""
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2]]
