"""Helper process that renders functions' own chat templates, started by gateway.calls.chat_templates.

Templates are tenants' programs: a few characters can take much memory and time. They run here in a process of low
priority, one conversation at a time. The process is killed when it needs too much memory or time.
"""

from __future__ import annotations

import os
import signal
import socket
from functools import lru_cache
from typing import Any

import jinja2
import msgspec

from adapters.helper_process import MEMORY_BYTES, NICENESS, bound_memory, holds_much, jobs, limited, send
from cluster.chat_template import ChatTemplate, compile_template, render

RENDER_SECONDS = 1.0
"""Limit of processor time for one conversation, in seconds; normal templates need some milliseconds."""
MAX_CHARACTERS = 4 << 20
"""Maximum characters of a rendered conversation: four times the limit of a call's body."""
MAX_COMPILED_TEMPLATES = 256


class Job(msgspec.Struct, frozen=True):
    """Arguments of cluster.chat_template.render, and a time limit."""

    template: str
    messages: list[dict[str, Any]]
    special: dict[str, str]
    answer: bool = True
    continues: bool = False
    variables: dict[str, Any] = {}
    seconds: float = RENDER_SECONDS


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str
    last: bool
    """True if the process uses so much memory that it should be replaced after this answer."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    problem: str
    last: bool


def outcome_of(job: Job) -> Rendered | Refused:
    """Returns the rendered conversation, or why it was refused.

    The process ends by SIGPROF once the job's seconds are over.
    """
    try:
        with limited(signal.ITIMER_PROF, job.seconds):
            text = render(
                _compiled(job.template),
                job.messages,
                job.special,
                answer=job.answer,
                continues=job.continues,
                variables=job.variables,
            )
            text.encode()  # a lone surrogate is no text
    except MemoryError:
        return Refused(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory", True)
    except jinja2.TemplateSyntaxError as error:
        return _refused(f"line {error.lineno}: {error.message}")
    except Exception as error:  # any exception comes from the template's own code
        return _refused(str(error) or type(error).__name__)
    if len(text) > MAX_CHARACTERS:
        return _refused(f"it makes {len(text)} characters of them; {MAX_CHARACTERS} are allowed")
    return Rendered(text, holds_much())


def _refused(problem: str) -> Refused:
    return Refused(problem[:500].encode(errors="replace").decode(), holds_much())


@lru_cache(MAX_COMPILED_TEMPLATES)
def _compiled(source: str) -> ChatTemplate:
    return compile_template(source)


def main() -> None:
    """Runs the process: answers jobs from the socket at standard input, until the gateway closes it."""
    os.nice(NICENESS)
    connection = socket.socket(fileno=0)
    bound_memory()
    for job in jobs(connection, Job):
        send(connection, outcome_of(job))


if __name__ == "__main__":
    main()
