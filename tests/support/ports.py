"""Ports for servers that tests and benchmarks start in other processes."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST_PORT = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 100


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nothing listens.

    It lies below the ports that the system itself gives to outgoing connections and to listeners on port 0, so that
    none of these can take it before the server listens. Raises OSError if no free port is found.
    """
    first_ephemeral = int(EPHEMERAL_RANGE.read_text().split()[0])
    for port in random.SystemRandom().sample(range(LOWEST_PORT, first_ephemeral), ATTEMPTS):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"none of {ATTEMPTS} drawn ports below {first_ephemeral} is free")
