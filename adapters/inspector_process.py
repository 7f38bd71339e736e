"""The process that inspects adapters' configs and headers for a gateway, started by adapters.inspector.

Configs and headers are untrusted, and a few bytes of JSON or of a regular expression can take much memory and time.
They are therefore read in this separate process with low priority. The process handles one adapter at a time, and is
killed when it exceeds its limits.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from functools import partial
from pathlib import Path

import msgspec

from adapters.base_model import BaseModel
from adapters.errors import InvalidAdapter, Problem, TooLarge
from adapters.helper_process import MEMORY_BYTES, NICENESS, bound_memory, holds_much, jobs, limited, receive, send
from adapters.modules import Modules
from adapters.peft_config import WEIGHTS_FILE, LoraSettings, field_problem
from adapters.peft_targets import Target, find_targets
from adapters.validate import Inspection, inspect_files

READ_SECONDS = 5.0
"""Maximum seconds of CPU time for reading and checking one adapter, without matching its patterns. Normal files need
some hundredths of a second."""
MATCH_SECONDS = 10.0
"""Maximum seconds of CPU time for matching one adapter's patterns, far more than normal patterns need."""


class Job(msgspec.Struct, frozen=True):
    """A job of the process: inspect one adapter."""

    config: bytes
    weights: str
    """Path of the weights file."""
    match_seconds: float = MATCH_SECONDS


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The adapter was refused. `omitted` is the number of further problems that are not listed."""

    problems: list[Problem]
    omitted: int = 0


class Oversized(msgspec.Struct, frozen=True, tag=True):
    """A file is larger than `limit`, in bytes."""

    message: str
    limit: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The adapter could not be inspected because of an internal error."""

    trace: str


Outcome = Inspection | Refused | Oversized | Failed


class Answer(msgspec.Struct, frozen=True):
    """Answer of the process to one job."""

    outcome: Outcome
    last: bool
    """True: the process uses so much memory that a new one should replace it."""


def outcome_of(job: Job, base: BaseModel) -> Outcome:
    """Returns the result of `inspect_files`, or the reason for its refusal. A timer signal kills the process at a
    limit: SIGPROF after READ_SECONDS, or SIGVTALRM after the job's `match_seconds` of matching."""
    try:
        with limited(signal.ITIMER_PROF, READ_SECONDS):
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


def _find(seconds: float, settings: LoraSettings, modules: Modules) -> list[Target]:
    """Returns the result of `find_targets`, under a separate limit of CPU time. Raises InvalidAdapter when matching
    takes too much memory."""
    try:
        with limited(signal.ITIMER_PROF, 0.0), limited(signal.ITIMER_VIRTUAL, seconds):
            return find_targets(settings, modules)
    except MemoryError:
        expected = f"at most {MEMORY_BYTES} bytes"
        problem = field_problem("target_modules", "its regular expressions take too much memory", expected)
        raise InvalidAdapter([problem]) from None


def main() -> None:
    """Answers jobs until the gateway closes the connection. Jobs and outcomes are sent over the socket that is standard
    input."""
    os.nice(NICENESS)
    connection = socket.socket(fileno=0)
    base = msgspec.msgpack.decode(receive(connection), type=BaseModel)
    bound_memory()
    for job in jobs(connection, Job):
        outcome = outcome_of(job, base)
        send(connection, Answer(outcome, last=holds_much()))


if __name__ == "__main__":
    main()
