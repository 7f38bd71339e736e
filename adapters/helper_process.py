"""A process of low priority and bounded memory that does what strangers' files ask for, one job after the other.

The gateway's half is HelperProcess; the other functions are the helper's own. Messages go over a socket, each behind
its length.
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
"""Beyond what the process has when it starts."""
KEPT_BYTES = 128 << 20
"""A process that holds more than this after its work is not kept."""
LENGTH_BYTES = 4
"""Size of the length that precedes each message."""
MAX_ANSWER_BYTES = 64 << 20
GIVEN = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment variables that a helper gets, in addition to Python's: no credentials of a store or of Redis."""
END_SECONDS = 10.0
"""Seconds that a process which has hung up may take to end."""


class HelperEnded(Exception):
    """The helper process has ended in the middle of its work; `code` is its exit code, or minus the signal that ended
    it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a helper process ended with exit code {code}")
        self.code = code


class HelperProcess:
    """A process that runs a module of this project. It starts with the first job, and again after it has ended. Methods
    block; one job at a time."""

    def __init__(self, module: str, hello: Callable[[], object] | None = None) -> None:
        """`module` is what the process runs; `hello` makes the first message to each process (None: there is none)."""
        self._module, self._hello = module, hello
        self.process: subprocess.Popen[bytes] | None = None
        """The latest one; None before the first job."""
        self.connection: socket.socket | None = None

    def ask(self, job: object, seconds: float) -> bytes:
        """Has the process do a job, and returns its answer. Raises TimeoutError after `seconds`, the start of the
        process included, and HelperEnded; the next job finds a new process then."""
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
        """Ends the process, and with it what it is doing. Safe in any thread."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """Ends the process and its connection; the next job finds a new process."""
        self.kill()
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _exit_code(self) -> int:
        """Returns the exit code of a process that has hung up, and ends it if it lives on."""
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
            self.process = subprocess.Popen(  # our own interpreter and module; -P: never one of the working directory
                [sys.executable, "-P", "-m", self._module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C is for the gateway, whose end is this process's, too
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
    """Returns the next `size` bytes of the connection; `deadline` is in monotonic seconds. Raises TimeoutError, and
    EOFError when the other side has hung up."""
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
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


# --- the helper's half


def receive(connection: socket.socket) -> bytes:
    """Returns the next message. Raises EOFError when the gateway has gone."""
    return _exactly(connection, int.from_bytes(_exactly(connection, LENGTH_BYTES), "little"))


def jobs(connection: socket.socket, kind: type[T]) -> Iterator[T]:
    """Yields jobs until the gateway hangs up."""
    while True:
        try:
            data = receive(connection)
        except EOFError:
            return
        yield msgspec.msgpack.decode(data, type=kind)


@contextmanager
def limited(timer: int, seconds: float) -> Iterator[None]:
    """Runs its block under a timer of the process: after `seconds` the timer's signal, which nobody handles, ends the
    process. What was left of the timer before is set again afterwards."""
    before, _ = signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, before)


def bound_memory() -> None:
    limit = _memory()[0] + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def holds_much() -> bool:
    """Returns whether the process holds so much memory that a new one should take over."""
    return _memory()[1] > KEPT_BYTES


def _memory() -> list[int]:
    """Returns the process's bytes of address space, and its bytes in memory, as a list of two."""
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2]]
