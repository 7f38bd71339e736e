"""TERM of `garnish up`: calls under way end, new ones are refused, and all is gone within the operator's bound."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from whole_service import MakeService, Service

STREAMS = 12
CALL = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
SLOWER = 8.0
"""Seconds for which the engine is held up: longer than the bound was that nobody could set."""


class SlowEngine(threading.Thread):
    """Lets the engine run for little of the time, as on a host that is far too busy, until `full_speed`."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._full_speed = pid, threading.Event()

    def run(self) -> None:
        with suppress(ProcessLookupError):
            while not self._full_speed.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                self._full_speed.wait(0.45)
                os.kill(self._pid, signal.SIGCONT)
                self._full_speed.wait(0.05)

    def full_speed(self) -> None:
        self._full_speed.set()
        self.join(30)


@contextmanager
def slow_engine(service: Service) -> Iterator[SlowEngine]:
    slow = SlowEngine(service.pid_of("node_agent.engine_process"))
    slow.start()
    try:
        yield slow
    finally:
        slow.full_speed()


def stream(service: Service, headers: dict[str, str], begun: threading.Semaphore) -> list[str]:
    """Names of the call's events. `begun` is released at the first one."""
    names: list[str] = []
    with (
        httpx.Client(base_url=service.url, headers=headers, timeout=120, verify=False) as client,
        client.stream("POST", "/invoke/stories260K", json=CALL) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("event: "):
                if not names:
                    begun.release()
                names.append(line.removeprefix("event: "))
            elif line.startswith("data: ") and names[-1:] == ["error"]:
                names.append(json.loads(line.removeprefix("data: "))["error"]["type"])
    return names


@contextmanager
def streams(service: Service, count: int) -> Iterator[list[Future[list[str]]]]:
    """Calls of which each has begun."""
    headers, begun = service.headers("acme"), threading.Semaphore(0)
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(stream, service, headers, begun) for _ in range(count)]
        for _ in calls:
            assert begun.acquire(timeout=60)
        yield calls


def test_calls_under_way_end_and_new_ones_are_refused(make_service: MakeService, stories_dir: Path) -> None:
    service = make_service(stories_dir).start()
    assert service.process is not None
    with streams_of_a_slow_engine(service, STREAMS) as (calls, slow):
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        wait_until_refused(service)
        assert threading.Event().wait(SLOWER) is False
        assert service.process.poll() is None
        slow.full_speed()
        ends = [call.result(60)[-1] for call in calls]
        assert ends == ["done"] * STREAMS
        assert service.stop() == 0
    assert time.monotonic() - began < 25 + 4 + 1


def test_calls_that_do_not_end_are_told(make_service: MakeService, stories_dir: Path) -> None:
    service = make_service(stories_dir).start("--stop-seconds", "2")
    assert service.process is not None
    tree = service.processes()
    with streams_of_a_slow_engine(service, 4) as (calls, _):
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        ends = [call.result(60)[-2:] for call in calls]
        assert ends == [["error", "unavailable"]] * 4
        assert service.process.wait(60) == 0
    assert 2 <= time.monotonic() - began < 2 + 4 + 1
    assert not [pid for pid in tree if Path(f"/proc/{pid}").exists()]


@contextmanager
def streams_of_a_slow_engine(service: Service, count: int) -> Iterator[tuple[list[Future[list[str]]], SlowEngine]]:
    with slow_engine(service) as slow, streams(service, count) as calls:
        yield calls, slow


def wait_until_refused(service: Service) -> None:
    """Waits until nothing listens at the service's port."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", service.port), timeout=60).close()
        except ConnectionError:  # reset, if the listener closed before it accepted
            return
