"""A gateway (whose workers share a Redis, if there are several) before a stub node process, and streams read from
either."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from adapters.base_model import load_base_model
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from benchmarks.latency import Sample
from benchmarks.stream_client import Streams
from benchmarks.stub_node import StubConfig
from benchmarks.tether import tethered
from cluster.secret import create_secret
from gateway.config import GatewayConfig
from tests.support.ports import free_port

GATEWAY = """
import sys, msgspec
from gateway.config import GatewayConfig
from gateway.server import run
run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig))
"""
START_SECONDS = 60.0
NAME = "pirate"


@dataclass(frozen=True)
class Rig:
    gateway: str
    stub: str
    key: str
    pid: int
    """Of the gateway."""

    @asynccontextmanager
    async def streams(self, url: str) -> AsyncIterator[Streams]:
        """From one of both servers, which answer alike."""
        streams = Streams(url, NAME, self.key)
        try:
            yield streams
        finally:
            await streams.close()


@contextmanager
def rig(
    model_dir: Path, adapter: Path, root: Path, gap: float, prefill: float, workers: int = 1, redis: str | None = None,
    tree: Path | None = None,
) -> Iterator[Rig]:  # fmt: skip
    """Both processes, and `adapter` deployed as `pirate`; `tree`: whose code the gateway runs."""
    base = load_base_model(model_dir, model_dir.name)
    tenants = Tenants(LocalStore(root / "registry"))
    tenants.put("bench")
    key, secret = tenants.add_key("bench")[0], create_secret(root / "secret")
    port = free_port()
    config = GatewayConfig(
        model_dir=str(model_dir), base_id=base.id, registry=str(root / "registry"), secret_file=str(root / "secret"),
        tmp_dir=str(root / "uploads"), port=port, shutdown_seconds=1.0, workers=workers, redis=redis,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        log = root / "gateway.log"
        gateway = stack.enter_context(process(["-c", GATEWAY], msgspec.json.encode(config), log, tree))
        told = msgspec.json.encode(StubConfig(url, secret, base.fingerprint, base.id, gap, prefill)) + b"\n"
        node = stack.enter_context(process(["-m", "benchmarks.stub_node"], told, root / "stub.log"))
        assert node.stdout is not None
        found = Rig(url, node.stdout.readline().decode().strip(), key, gateway.pid)
        wait_until_ready(found.gateway, gateway, log)
        _deploy(found, adapter)
        yield found


@contextmanager
def process(
    arguments: list[str], told: bytes | None, log: Path, tree: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`told` is all of its standard input (None: that ends when the context does); `tree`: whose code it runs."""
    settings = {} if tree is None else {"cwd": tree, "env": os.environ | {"PYTHONPATH": str(tree)}}
    with log.open("wb") as errors:
        command = tethered([sys.executable, *arguments])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, **settings)  # type: ignore[call-overload]
    assert process.stdin is not None and process.stdout is not None
    try:
        if told is not None:
            process.stdin.write(told)
            process.stdin.close()
        yield process
    finally:
        process.stdin.close()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until_ready(url: str, gateway: subprocess.Popen[bytes], log: Path, path: str = "/readyz") -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and gateway.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + path, timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the gateway did not get ready:\n{log.read_text()[-2000:]}")


def _deploy(found: Rig, adapter: Path) -> None:
    files = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    headers = {"authorization": f"Bearer {found.key}"}
    httpx.post(f"{found.gateway}/deploy/{NAME}", files=files, headers=headers, timeout=60).raise_for_status()


async def steady(streams: Streams, count: int, tokens: int, gap: float, seconds: float) -> list[Sample]:
    """`count` callers, each with one stream after another, begun evenly over the length of one."""
    until, samples = time.monotonic() + seconds, list[Sample]()

    async def caller(number: int) -> None:
        await asyncio.sleep(number / count * tokens * gap)
        while time.monotonic() < until:
            samples.append(await streams.call(tokens))

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(caller(number))
    return samples
