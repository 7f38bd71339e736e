"""A gateway (whose workers share a Redis, if there are several) before a stub node process, and a client that reads
streams from either."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server

import aiohttp
import httpx
import msgspec

from adapters.base_model import load_base_model
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from benchmarks.latency import Sample
from benchmarks.load import recorded
from benchmarks.stub_node import StubConfig
from cluster.secret import create_secret
from gateway.config import GatewayConfig

GATEWAY = """
import sys, msgspec
from gateway.config import GatewayConfig
from gateway.server import run
run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig))
"""
START_SECONDS = 60.0
IDLE_BASE = 60.0
"""Added to the idle time in a call's `timeout`, by which the stub knows it."""
NAME = "pirate"


@dataclass(frozen=True)
class Rig:
    gateway: str
    stub: str
    key: str
    pid: int
    """Of the gateway."""


@contextmanager
def rig(
    model_dir: Path, adapter: Path, root: Path, gap: float, prefill: float, workers: int = 1, redis: str | None = None
) -> Iterator[Rig]:
    """Both processes, and `adapter` deployed as `pirate`."""
    base = load_base_model(model_dir, model_dir.name)
    tenants = Tenants(LocalStore(root / "registry"))
    tenants.put("bench")
    key, secret = tenants.add_key("bench")[0], create_secret(root / "secret")
    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = GatewayConfig(
        model_dir=str(model_dir), base_id=base.id, registry=str(root / "registry"), secret_file=str(root / "secret"),
        tmp_dir=str(root / "uploads"), port=port, shutdown_seconds=1.0, workers=workers, redis=redis,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        log = root / "gateway.log"
        gateway = stack.enter_context(process(["-c", GATEWAY], msgspec.json.encode(config), log))
        told = msgspec.json.encode(StubConfig(url, secret, base.fingerprint, base.id, gap, prefill)) + b"\n"
        node = stack.enter_context(process(["-m", "benchmarks.stub_node"], told, root / "stub.log"))
        assert node.stdout is not None
        found = Rig(url, node.stdout.readline().decode().strip(), key, gateway.pid)
        wait_until_ready(found.gateway, gateway, log)
        _deploy(found, adapter)
        yield found


@contextmanager
def process(arguments: list[str], told: bytes, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as errors:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(told)
        process.stdin.close()
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until_ready(url: str, gateway: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and gateway.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/readyz", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the gateway did not get ready:\n{log.read_text()[-2000:]}")


def _deploy(found: Rig, adapter: Path) -> None:
    files = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    headers = {"authorization": f"Bearer {found.key}"}
    httpx.post(f"{found.gateway}/deploy/{NAME}", files=files, headers=headers, timeout=60).raise_for_status()


class Streams:
    """Calls one of both servers, which answer alike."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url = session, f"{url}/invoke/{NAME}"
        self._headers = {"authorization": f"Bearer {key}"}
        self.delays: list[float] = []
        """Seconds from each token's sending to its receipt."""

    async def call(self, tokens: int, idle: float = 0.0) -> Sample:
        body = {"prompt": "Once", "max_tokens": tokens, "stream": True, "timeout": IDLE_BASE + idle, "ignore_eos": True}
        sample = Sample(NAME, sent=time.monotonic())
        async with recorded(sample), self._session.post(self._url, json=body, headers=self._headers) as reply:
            sample.error = str(reply.status) if reply.status != 200 else await self._read(reply.content, sample)
        sample.end = time.monotonic()
        return sample

    async def _read(self, stream: aiohttp.StreamReader, sample: Sample) -> str:
        """The error, or nothing."""
        kind = b""
        async for line in stream:
            now = time.monotonic()
            if line.startswith(b"event: "):
                kind = line[7:].strip()
            elif line.startswith(b"data: ") and kind == b"token":
                sample.times.append(now)
                self.delays.append(now - float(json.loads(line[6:])["text"]))
            elif line.startswith(b"data: "):
                sample.output_tokens = json.loads(line[6:]).get("usage", {}).get("completion_tokens", 0)
                return "" if kind == b"done" else "error event"
        return "cut off"


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
