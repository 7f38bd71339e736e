"""The process that looks at adapters' configs and headers for a gateway, started by adapters.inspector.

Both are written by strangers, and a few bytes of JSON or of a regular expression can take much memory and time: here
they take those of a process of low priority, one adapter after the other, that is killed when it needs more.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from adapters.base_model import BaseModel
from adapters.errors import InvalidAdapter, Problem, TooLarge
from adapters.helper_process import MEMORY_BYTES, NICENESS, bound_memory, holds_much, jobs, limited, receive, send
from adapters.peft_config import WEIGHTS_FILE, LoraSettings, field_problem
from adapters.peft_targets import Target, find_targets
from adapters.validate import Inspection, inspect_files

READ_SECONDS = 5.0
"""Processor time for all but matching; honest files need some hundredths."""
MATCH_SECONDS = 10.0
"""Processor time for matching, far above what honest patterns need."""


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
    """The adapter could not be inspected because of our own fault."""

    trace: str


Outcome = Inspection | Refused | Oversized | Failed


class Answer(msgspec.Struct, frozen=True):
    outcome: Outcome
    last: bool
    """The process holds so much memory that a new one should take over."""


def outcome_of(job: Job, base: BaseModel) -> Outcome:
    """Returns what `inspect_files` finds, or why it refuses. Ends the process when READ_SECONDS are over, by SIGPROF,
    or, while it matches, the job's `match_seconds`, by SIGVTALRM."""
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


def _find(seconds: float, settings: LoraSettings, names: Sequence[str]) -> list[Target]:
    """Does what `find_targets` does, under a limit of processor time for it alone. Raises InvalidAdapter when matching
    takes too much memory."""
    try:
        with limited(signal.ITIMER_PROF, 0.0), limited(signal.ITIMER_VIRTUAL, seconds):
            return find_targets(settings, names)
    except MemoryError:
        expected = f"at most {MEMORY_BYTES} bytes"
        problem = field_problem("target_modules", "its regular expressions take too much memory", expected)
        raise InvalidAdapter([problem]) from None


def main() -> None:
    """Answers jobs until the gateway hangs up. Jobs come, and outcomes go, over the socket that is the standard
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
