"""The whole service as a user starts it, and a client that calls it: what HTTP adds to the engine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from types import TracebackType

import aiohttp
import httpx

from benchmarks.common.processes import tethered
from benchmarks.common.report import ROOT
from cluster.secret import read_secret
from garnish.credentials import FILE_NAME, read_credentials
from tests.support.ports import free_port

START_LIMIT = 300.0
LOG_CHARACTERS = 6000
"""Length of each log's end that is shown if the service does not start."""
COSTS = Path(".garnish", "profiles", "node-1.performance.json")
"""Performance model of a service's node, below the service's root."""


class HttpService:
    """`garnish up` in a separate process, with the given adapters deployed as a0, a1, ..."""

    def __init__(
        self,
        model_dir: Path,
        adapters: list[Path],
        root: Path,
        dtype: str,
        threads: int,
        node: str = "",
        gateway: str = "",
        options: tuple[str, ...] = (),
        registry: str = "",
        device: str = "cpu",
        prefix_cache: str = "off",
        file: str = "",
        tree: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`node`: what else serverless.yml says of the node, as `, key: value`; `gateway`: what it says of the gateway;
        `options` of `garnish up`; `registry`: empty for the default, in the state directory. What is timed must not
        depend on what was asked before, so there is no `prefix_cache` unless it is asked for. `file`: serverless.yml as
        a whole, in place of what all these would make of it. `tree`: the checkout whose code runs. `environment`:
        variables that the service's processes have besides this process's."""
        self.root, self.adapters = root, adapters
        self.base = model_dir.name
        root.mkdir(parents=True)
        functions = "".join(f"  a{i}: {{tenant: bench, adapter: {path}}}\n" for i, path in enumerate(adapters))
        node = f"dtype: {dtype}, device: {device}, prefix_cache: '{prefix_cache}'{node}"
        (root / "serverless.yml").write_text(
            file
            or f"service: bench\nbase_model: {model_dir}\nnode: {{{node}}}\ngateway: {{{gateway}}}\n"
            + (f"registry: {registry}\n" if registry else "")
            + f"tenants:\n  bench: {{}}\nfunctions:\n{functions}"
        )
        self.threads = threads
        self.options = options
        self._environment = os.environ | {"PYTHONPATH": str(tree)} | dict(environment or {})
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> HttpService:
        command = [str(Path(sys.executable).parent / "garnish"), "up", "-f", "serverless.yml", "--port", str(self.port)]
        command += self.options
        self._log = (self.root / "up.log").open("w")
        self._process = subprocess.Popen(
            tethered(command), cwd=self.root, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + START_LIMIT
        while "\nready" not in (self.root / "up.log").read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start:\n{self._logs()}")
            time.sleep(0.2)
        state = self.root / ".garnish"
        keys = read_credentials(state / FILE_NAME)
        if keys is None:
            raise RuntimeError(f"the service left no {FILE_NAME} in {state}")
        self.key, self.admin_key, self.secret = keys.api_key, keys.admin_key, read_secret(state / "cluster.secret")
        return self

    def client(self, *, admin: bool = False, timeout: float = 30.0) -> httpx.Client:
        """Returns a client of this service, with the tenant's key or the administrator's."""
        headers = {"authorization": f"Bearer {self.admin_key if admin else self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def _logs(self) -> str:
        files = [self.root / "up.log", *sorted((self.root / ".garnish" / "logs").glob("*.log"))]
        return "\n".join(f"{file.name}: {file.read_text()[-LOG_CHARACTERS:]}" for file in files)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def use_costs(self, costs: Path) -> None:
        """Give the node, before it starts, what another service's node measured of its passes, so that it does not
        measure them in gaps between calls."""
        (self.root / COSTS).parent.mkdir(parents=True)
        shutil.copy(costs, self.root / COSTS)

    def run(self, adapters: tuple[int | None, ...], prompt_tokens: int, count: int) -> tuple[float, float]:
        """(median seconds to the first token, tokens per second), all requests sent at once."""
        return asyncio.run(self._run(adapters, prompt_tokens, count))

    async def _run(self, adapters: tuple[int | None, ...], prompt_tokens: int, count: int) -> tuple[float, float]:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {self.key}"}) as session:
            begin = time.perf_counter()
            firsts = await asyncio.gather(
                *(self._call(session, i, n, prompt_tokens, count, begin) for n, i in enumerate(adapters))
            )
            return median(firsts), len(adapters) * count / (time.perf_counter() - begin)

    async def _call(
        self, session: aiohttp.ClientSession, adapter: int | None, n: int, prompt_tokens: int, count: int, begin: float
    ) -> float:
        name = self.base if adapter is None else f"a{adapter}"
        body = {
            "prompt": " the" * (prompt_tokens - 1) + f" {n}"[:2], "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        first = 0.0
        async with session.post(f"{self.url}/invoke/{name}", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {await reply.text()}")
            async for line in reply.content:
                if line.startswith(b"data:"):
                    first = first or time.perf_counter() - begin
                    data = json.loads(line[5:])
        if data["usage"]["completion_tokens"] != count:
            raise RuntimeError(f"a request did not get all its tokens: {data}")
        return first
