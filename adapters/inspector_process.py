"""The process that looks at adapters' configs and headers for a gateway, started by adapters.inspector.

Both are written by strangers, and a few bytes of JSON or of a regular expression can take much memory and time: here
they take those of a process of low priority, one adapter after the other, that is killed when it needs more.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from adapters.base_model import BaseModel
from adapters.errors import InvalidAdapter, Problem, TooLarge
from adapters.peft_config import WEIGHTS_FILE, LoraSettings, field_problem
from adapters.peft_targets import MATCH_SECONDS, Target, match
from adapters.validate import Inspection, inspect_files

NICENESS = 10
READ_SECONDS = 5.0
"""Processor time for all but matching; honest files need some hundredths."""
MEMORY_BYTES = 512 << 20
"""Beyond what the process has when it starts."""
KEPT_BYTES = 128 << 20
"""A process that holds more than this after its work is not kept."""
LENGTH_BYTES = 4
"""Before each message, its length."""


class Job(msgspec.Struct, frozen=True):
    config: bytes
    weights: str
    """Path of the weights file."""
    match_seconds: float = MATCH_SECONDS


class Refused(msgspec.Struct, frozen=True, tag=True):
    problems: list[Problem]
    omitted: int = 0


class Oversized(msgspec.Struct, frozen=True, tag=True):
    message: str
    limit: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """By a fault of our own."""

    trace: str


Outcome = Inspection | Refused | Oversized | Failed


class Answer(msgspec.Struct, frozen=True):
    outcome: Outcome
    last: bool
    """Whether the process holds so much memory that a new one should go on."""


def outcome_of(job: Job, base: BaseModel) -> Outcome:
    """Ends the process when READ_SECONDS are over, by SIGPROF, or, while it matches, the job's `match_seconds`, by
    SIGVTALRM."""
    try:
        with _limited(signal.ITIMER_PROF, READ_SECONDS):
            return inspect_files(job.config, Path(job.weights), base, partial(_find, job.match_seconds))
    except InvalidAdapter as error:
        listed = error.problems[:-1] if error.omitted else error.problems
        return Refused(listed, error.omitted)
    except TooLarge as error:
        return Oversized(str(error), error.limit)
    except MemoryError:
        problem = Problem(WEIGHTS_FILE, "reading its header takes too much memory", f"at most {MEMORY_BYTES} bytes")
        return Refused([problem])
    except Exception:
        return Failed(traceback.format_exc()[-4000:])


def _find(seconds: float, settings: LoraSettings, names: Sequence[str]) -> list[Target]:
    """`match`, under the limit for it alone."""
    try:
        with _limited(signal.ITIMER_PROF, 0.0), _limited(signal.ITIMER_VIRTUAL, seconds):
            return match(settings, names)
    except MemoryError:
        expected = f"at most {MEMORY_BYTES} bytes"
        problem = field_problem("target_modules", "its regular expressions take too much memory", expected)
        raise InvalidAdapter([problem]) from None


@contextmanager
def _limited(timer: int, seconds: float) -> Iterator[None]:
    """The timer's signal, which nobody handles, ends the process."""
    before, _ = signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, before)


def send(connection: socket.socket, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def _receive(connection: socket.socket) -> bytes:
    """The next message. Raises EOFError when the gateway has gone."""
    return _exactly(connection, int.from_bytes(_exactly(connection, LENGTH_BYTES), "little"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(1 << 20, size - len(data)))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _memory() -> list[int]:
    """Bytes of address space, and of those in memory."""
    return [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2]]


def _bound_memory() -> None:
    limit = _memory()[0] + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> NoReturn:
    """Jobs come, and outcomes go, over the socket that is the standard input."""
    os.nice(NICENESS)
    connection = socket.socket(fileno=0)
    base = msgspec.msgpack.decode(_receive(connection), type=BaseModel)
    _bound_memory()
    while True:
        try:
            job = msgspec.msgpack.decode(_receive(connection), type=Job)
        except EOFError:
            raise SystemExit(0) from None
        outcome = outcome_of(job, base)
        send(connection, Answer(outcome, last=_memory()[1] > KEPT_BYTES))


if __name__ == "__main__":
    main()
