"""Helper process that checks the forms of structured output, started by gateway.calls.grammars.

A schema of a few hundred characters can take minutes and gigabytes, which no limit of llguidance prevents. The process
is killed when it needs too much memory or time.
"""

from __future__ import annotations

import os
import signal
import socket

import msgspec

from adapters.helper_process import NICENESS, bound_memory, holds_much, jobs, limited, send
from cluster.grammars import problem_of
from cluster.messages import Grammar

CHECK_SECONDS = 2.0
"""Limit of processor time for one check; normal forms need some milliseconds."""
PROBLEM_CHARACTERS = 1000
"""Maximum characters of a problem; the rest is left out."""


class Checked(msgspec.Struct, frozen=True):
    problem: str
    """Reason why the form can't be kept; an empty text if it can."""
    last: bool
    """True if the process uses so much memory that it should be replaced after this answer."""


def main() -> None:
    """Runs the process: answers jobs from the socket at standard input, until the gateway closes it."""
    os.nice(NICENESS)
    connection = socket.socket(fileno=0)
    bound_memory()
    for grammar in jobs(connection, Grammar):
        with limited(signal.ITIMER_PROF, CHECK_SECONDS):
            problem = problem_of(grammar)
        send(connection, Checked(problem[:PROBLEM_CHARACTERS], holds_much()))


if __name__ == "__main__":
    main()
