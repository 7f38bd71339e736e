"""Looks at adapters' configs and headers in one helper process of low priority, with limits; see inspector_process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from adapters.base_model import BaseModel
from adapters.errors import InspectionBusy, InvalidAdapter, Problem, TooLarge
from adapters.inspector_process import LENGTH_BYTES, READ_SECONDS, Answer, Failed, Job, Oversized, Refused, send
from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE, field_problem
from adapters.peft_targets import MATCH_SECONDS
from adapters.validate import Inspection

WAIT_SECONDS = 60.0
"""For the adapters before."""
ANSWER_SECONDS = 60.0
"""For one answer, the start of the process included. Its limits are in processor time: this one ends the wait for a
host that gives the process next to none."""
MAX_ANSWER_BYTES = 64 << 20


class Inspector:
    """One adapter at a time. The process starts with the first one, and again after it was killed.

    Methods block; they may be called from any thread.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Returns the pid of the latest helper process; None before the first one was needed."""
        return None if self._process is None else self._process.pid

    def inspect(self, config: bytes, weights: Path) -> Inspection:
        """Raises InvalidAdapter, also for what takes too much memory or time; TooLarge; InspectionBusy."""
        if not self._turn.acquire(timeout=WAIT_SECONDS):
            raise InspectionBusy(f"other adapters were looked at for {WAIT_SECONDS:g} s; try again later")
        try:
            answer = self._ask(Job(config, str(weights.absolute()), MATCH_SECONDS))
            if answer.last:
                self._end()
        except BaseException:
            self._end()
            raise
        finally:
            self._turn.release()
        match answer.outcome:
            case Refused(problems, omitted):
                raise InvalidAdapter(problems, omitted)
            case Oversized(message, limit):
                raise TooLarge(message, limit)
            case Failed(trace):
                raise RuntimeError(f"an adapter could not be looked at: {trace}")
            case inspection:
                return inspection

    def close(self) -> None:
        """Ends the process, and with it what is being looked at."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, job: Job) -> Answer:
        deadline = time.monotonic() + ANSWER_SECONDS
        connection = self._started()
        try:
            connection.settimeout(ANSWER_SECONDS)
            send(connection, job)
            size = int.from_bytes(_exactly(connection, LENGTH_BYTES, deadline), "little")
            if size > MAX_ANSWER_BYTES:
                raise RuntimeError(f"an adapter's inspection has {size} bytes")
            return msgspec.msgpack.decode(_exactly(connection, size, deadline), type=Answer)
        except TimeoutError:
            raise InspectionBusy(
                f"this host is too busy to look at an adapter within {ANSWER_SECONDS:g} s; try again later"
            ) from None
        except (EOFError, ConnectionError):
            raise self._ended() from None

    def _started(self) -> socket.socket:
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # our own interpreter and module; -P: never one of the working directory
                [sys.executable, "-P", "-m", "adapters.inspector_process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C is for the gateway, whose end is this process's, too
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._connection = ours
        ours.settimeout(ANSWER_SECONDS)
        send(ours, self._base)
        return ours

    def _ended(self) -> Exception:
        """Why the process has ended in the middle of its work."""
        assert self._process is not None
        code = self._process.wait(ANSWER_SECONDS)
        if code == -signal.SIGVTALRM:
            problem = "its regular expressions take too long to match"
            return InvalidAdapter([field_problem("target_modules", problem, f"{MATCH_SECONDS:g} s")])
        if code == -signal.SIGPROF:
            return InvalidAdapter([Problem(WEIGHTS_FILE, "reading its header takes too long", f"{READ_SECONDS:g} s")])
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return InspectionBusy("the process that looks at adapters was ended from outside; try again later")
        if code < 0:
            return InvalidAdapter([Problem(CONFIG_FILE, "it breaks the process that looks at it")])
        return RuntimeError(f"the process that looks at adapters ended with exit code {code}")

    def _end(self) -> None:
        """The next adapter finds a new process."""
        self.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Raises TimeoutError, EOFError."""
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = connection.recv(min(1 << 20, size - len(data)))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
