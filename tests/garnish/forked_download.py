"""Stands for `python -m garnish.hub` where that is started dozens of times: each run is forked from a process
that has loaded what the library loads, and gets the environment and the standard files of the process that asked.

The library itself, which reads the environment when it is loaded, is loaded by each run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOADED = ("httpx2", "httpcore2", "tqdm", "yaml")
ASKER = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    socket.send_fds(server, [b"0"], [0, 1, 2])
    server.sendall(json.dumps(dict(os.environ)).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16) or 1))
"""


@contextmanager
def downloading() -> Iterator[tuple[str, ...]]:
    """Provides a command that takes the place of `garnish.hub.COMMAND`."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        command = [sys.executable, "-m", "tests.garnish.forked_download", path]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == "up\n"
                yield sys.executable, "-I", "-S", "-c", ASKER, path
            finally:
                server.kill()


def main() -> None:
    from garnish import hub

    for name in LOADED:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        sys.stdout.write("up\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    run(hub.main, connection)


def run(work: Callable[[], int], connection: socket.socket) -> None:
    """Does the work for whoever asked, and ends this process."""
    try:
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        told = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        os.environ.clear()
        os.environ.update(json.loads(told))
        code = work()
        sys.stdout.flush()
        connection.sendall(str(code).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
