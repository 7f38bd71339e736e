"""Many connections that send nothing, to a server with few file descriptors."""

from __future__ import annotations

import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NEEDED = 4096
"""Descriptors that the test process needs."""
LIMITED = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
"""Begin of a program that has few descriptors."""


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Opens `count` connections to a port of this host, one after another."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(NEEDED, hard)), hard))
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(count)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def closed(connections: list[socket.socket]) -> int:
    """Returns how many of the connections the server has closed. Nothing else may arrive on them."""
    watch = select.poll()
    for connection in connections:
        watch.register(connection, select.POLLIN)
    return len(watch.poll(0))


def descriptor_limit(pid: int) -> int:
    """Returns the soft limit of a process's descriptors."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Max open files")).split()[3])


def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds. The test's own time limit bounds the wait."""
    while not condition():
        time.sleep(0.01)
