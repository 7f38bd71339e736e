"""The network in front of the S3 server, and what the study makes of its rows."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.coldstart.remote_store import DELAY, RATE, figures_of, measured
from benchmarks.common.latency import Sample
from benchmarks.common.slow_link import slow_link

SIZE = 300_000


@pytest.fixture
def server() -> Iterator[int]:
    """Answers each connection's requests, of one byte each, with SIZE bytes of that value."""

    def answer(connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(1):
                connection.sendall(asked * SIZE)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]


def ask(port: int, bytes_asked: bytes) -> tuple[bytes, float]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        begin, got = time.monotonic(), b""
        for one in bytes_asked:
            connection.sendall(bytes([one]))
            want = len(got) + SIZE
            while len(got) < want:
                got += connection.recv(1 << 16)
        return got, time.monotonic() - begin


def test_each_request_is_delayed_and_all_share_the_rate(server: int) -> None:
    rate, delay = 3e6, 0.1
    with slow_link(server, rate, delay) as port:
        got, seconds = ask(port, b"ab")
        assert got == b"a" * SIZE + b"b" * SIZE
        assert seconds >= 2 * (delay + SIZE / rate)
        threads = [threading.Thread(target=ask, args=(port, b"c")) for _ in range(3)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - begin >= delay + 3 * SIZE / rate


def test_the_rate_is_reached(server: int) -> None:
    """By one connection, where no timer's lateness adds up: 46 pieces, of 1.3 ms each."""
    rate, times = 50e6, 10
    with slow_link(server, rate, 0.0) as port:
        best = min(ask(port, b"a" * times)[1] for _ in range(8))
        assert times * SIZE / rate <= best < 1.5 * times * SIZE / rate


def sample(ttft: float, e2e: float) -> Sample:
    return Sample("a", sent=5.0, times=[5.0 + ttft], end=5.0 + e2e, output_tokens=64)


def test_figures() -> None:
    """A fetch that is shorter than a warm prefill, and one that is longer."""
    short, long = int((0.08 - DELAY) * RATE), int((0.5 - DELAY) * RATE)
    rows = [
        measured("auto", 1, short, 0.09, sample(0.2, 1.2), sample(0.1, 1.1)),
        measured("auto", 2, long, 0.8, sample(0.6, 1.6), sample(0.1, 1.1)),
    ]
    assert [row["bound_s"] for row in rows] == pytest.approx([1.1, 1.5])
    found = figures_of(rows)
    assert found["cold_over_warm_auto_count"] == 1
    assert found["cold_over_warm_auto"] == pytest.approx(1.2 / 1.1)
    assert found["cold_over_bound_auto_max"] == pytest.approx(1.2 / 1.1)
    assert found["ttft_over_bound_auto"] == pytest.approx((2.0 + 1.2) / 2)
    assert found["cold_over_plain_auto"] == pytest.approx((1.2 / 1.1 + 1.6 / 1.8) / 2)
    assert found["plain_over_fetch_auto_max"] == pytest.approx(0.8 / 0.5)
