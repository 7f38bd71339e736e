"""The command line in processes of its own, without the second in which each would load its modules: a process that has
loaded them forks for each command."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAM = """
import importlib, json, os, pkgutil, sys, traceback

import garnish
from garnish.cli.main import main

for module in pkgutil.iter_modules(garnish.__path__):
    if not module.ispkg and not module.name.startswith("run_"):
        importlib.import_module(f"garnish.{module.name}")


def run(job):
    for number, path in enumerate(job["files"]):
        opened = os.open(path, os.O_RDWR | os.O_NOCTTY)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))
    sys.argv = ["garnish", *job["arguments"]]
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code


replies = os.dup(1)
for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = run(json.loads(line))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.write(replies, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
ROOT = Path(__file__).parents[2]


class CommandLine:
    """Runs one command at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(
        self, *arguments: str, folder: Path, environment: Mapping[str, str], answer: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Returns what `garnish` with these arguments says in the folder; `answer`: what is written to it."""
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.NamedTemporaryFile("w+")) for _ in range(3)]
            files[0].write(answer)
            files[0].flush()
            self._begin(arguments, folder, environment, [file.name for file in files])
            code = self._end()
            return subprocess.CompletedProcess(arguments, code, files[1].read(), files[2].read())

    def show(
        self, *arguments: str, folder: Path, environment: Mapping[str, str], columns: int
    ) -> subprocess.CompletedProcess[str]:
        """The same on a terminal of so many columns, which is sent all that is said."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._begin(arguments, folder, environment, [os.ttyname(theirs)] * 3)
        assert self._process.stdout is not None
        shown, replies = b"", self._process.stdout.fileno()
        while ours in select.select([ours, replies], [], [])[0]:
            shown += os.read(ours, 1 << 16)
        code = self._end()
        os.close(theirs)
        with suppress(OSError):  # the terminal's other side is closed
            while piece := os.read(ours, 1 << 16):
                shown += piece
        os.close(ours)
        return subprocess.CompletedProcess(arguments, code, shown.decode())

    def _begin(
        self, arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], files: list[str]
    ) -> None:
        job = {"arguments": arguments, "folder": str(folder), "environment": dict(environment), "files": files}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()

    def _end(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@contextmanager
def running_command_line() -> Iterator[CommandLine]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        yield CommandLine(process)
        assert process.stdin is not None
        process.stdin.close()
