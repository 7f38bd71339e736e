"""Note in the node's run directory about the engine's last exit.

The supervisor writes the note, and the API process reports it. Without it, a node whose engine can't start (no weights,
no memory) would only ever report that it is warming.
"""

from __future__ import annotations

import logging
import signal
from contextlib import suppress
from pathlib import Path

NAME = "engine.exit"
MAX_CHARACTERS = 200
"""Maximum characters of the note that are read."""

log = logging.getLogger(__name__)


def describe(code: int) -> str:
    """Returns a text that describes a process's exit code. `code` is as given by subprocess: negative for a signal."""
    if code >= 0:
        return f"the engine ended with exit code {code}; the node's log says why"
    names = {number.value: number.name for number in signal.Signals}
    return f"the engine was ended by {names.get(-code, f'signal {-code}')}"


def write_exit(run_dir: Path, code: int) -> None:
    """Writes the note for this exit code, and replaces an earlier one atomically. On a full or read-only disk it only
    logs that there is no note."""
    temporary = run_dir / f"{NAME}.new"
    try:
        temporary.write_text(describe(code))
        temporary.replace(run_dir / NAME)
    except OSError as error:
        log.warning("the node can't report why its engine ended: %s", error, extra={"exit": describe(code)})


def read_exit(run_dir: Path) -> str:
    """Returns the note's text; empty if there is none."""
    try:
        return (run_dir / NAME).read_text()[:MAX_CHARACTERS]
    except OSError:
        return ""


def clear_exit(run_dir: Path) -> None:
    """Removes the note. Called when the engine is ready, and when the node restarts. On a read-only disk it stays."""
    with suppress(OSError):
        (run_dir / NAME).unlink(missing_ok=True)
