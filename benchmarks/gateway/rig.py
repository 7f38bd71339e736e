"""A gateway (whose workers share a Redis, if there are several) before a stub node process, and streams read from
either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from adapters.base_model import load_base_model
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from benchmarks.common.gateway_process import gateway_process
from benchmarks.common.latency import Sample
from benchmarks.common.processes import process
from benchmarks.gateway.stream_client import Streams
from benchmarks.gateway.stub_node import StubConfig

NAME = "pirate"


@dataclass(frozen=True)
class Rig:
    gateway: str
    stub: str
    key: str
    pid: int

    @asynccontextmanager
    async def streams(self, url: str) -> AsyncIterator[Streams]:
        """Yields streams from the gateway or the stub, which answer alike."""
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
    key = tenants.add_key("bench")[0]
    with gateway_process(model_dir, str(root / "registry"), root, workers=workers, redis=redis, tree=tree) as gateway:
        config = StubConfig(gateway.url, gateway.secret, base.fingerprint, base.id, gap, prefill)
        line = msgspec.json.encode(config) + b"\n"
        with process(["-m", "benchmarks.gateway.stub_node"], line, root / "stub.log") as node:
            assert node.stdout is not None
            running = Rig(gateway.url, node.stdout.readline().decode().strip(), key, gateway.process.pid)
            gateway.wait_until_ready()
            _deploy(running, adapter)
            yield running


def _deploy(running: Rig, adapter: Path) -> None:
    files = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    headers = {"authorization": f"Bearer {running.key}"}
    httpx.post(f"{running.gateway}/deploy/{NAME}", files=files, headers=headers, timeout=60).raise_for_status()


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
