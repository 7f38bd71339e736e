"""A worker that can't start does not end a gateway whose other workers serve: it is started again, after pauses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from running_gateway import until
from test_gateway_server import PROGRAM, config, process, wait_for  # noqa: F401  (config is a fixture)

from gateway.config import GatewayConfig
from tests.support.redis_server import redis_server

WORKERS = 3
SOON = "from gateway import server\nserver.FIRST_PAUSE = server.MAX_PAUSE = 0.2\n"


@dataclass
class Place:
    """A gateway of several workers, its process and its log."""

    child: subprocess.Popen[bytes]
    config: GatewayConfig
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.port}"

    @property
    def workers(self) -> list[int]:
        pid = self.child.pid
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def logged(self, message: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["message"].startswith(message)]

    def answers(self) -> set[int]:
        """Over connections of their own, which any worker may take."""
        return {httpx.get(f"{self.url}/healthz", timeout=60, verify=False).status_code for _ in range(10)}


@pytest.fixture
def there(config: GatewayConfig, tmp_path: Path) -> Iterator[Place]:  # noqa: F811
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis") as redis:
        changed = msgspec.structs.replace(config, workers=WORKERS, redis=redis.url)
        with process(changed, tmp_path / "log", SOON + PROGRAM) as child:
            found = Place(child, changed, tmp_path / "log")
            wait_for(found.url, "/healthz", child)
            until(lambda: len(found.logged("worker is ready")) == WORKERS)
            yield found


@contextmanager
def no_secret(there: Place) -> Iterator[None]:
    """A file that each worker reads when it starts is away."""
    file = Path(there.config.secret_file)
    away = file.rename(file.with_name("away"))
    try:
        yield
    finally:
        away.rename(file)


@contextmanager
def no_descriptors(there: Place) -> Iterator[None]:
    """The first process can't open a file, and so can't start a worker."""
    pid = there.child.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


Lack = Callable[[Place], AbstractContextManager[None]]


@pytest.mark.parametrize("lack", [no_secret, no_descriptors])
def test_the_others_serve_until_it_can_start(there: Place, lack: Lack) -> None:
    killed, *others = there.workers
    with lack(there):
        os.kill(killed, signal.SIGKILL)
        until(lambda: there.child.poll() is not None or len(there.logged("a worker could not start")) >= 2)
        assert there.child.poll() is None, there.log.read_text()[-2000:]
        assert there.answers() == {200}
        assert set(others) <= set(there.workers)
    until(lambda: len(there.logged("worker is ready")) == WORKERS + 1)
    assert len(there.workers) == WORKERS and there.answers() == {200}
    there.child.send_signal(signal.SIGTERM)
    assert there.child.wait(30) == 0


def test_it_ends_when_no_worker_is_left(there: Place) -> None:
    """So that its supervisor, which callers' balancers see, starts it again."""
    with no_secret(there):
        for pid in there.workers:
            os.kill(pid, signal.SIGKILL)
        assert there.child.wait(60) == 3
