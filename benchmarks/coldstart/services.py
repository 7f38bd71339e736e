"""The services of benchmarks/coldstart/default.py: `garnish up` with files that say almost nothing of the node."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

from adapters.base_model import load_base_model
from benchmarks.common.adapters import make_adapters
from benchmarks.common.http_service import HttpService
from benchmarks.common.invoke import Caller, check, until_measured
from benchmarks.common.load import Planned, closed_loop, open_session
from benchmarks.common.processes import service_usage
from garnish.client import Client

FILE_ITEM_BYTES = 2
"""Adapters' files are in bfloat16."""
FIRST_TOKENS = 8
"""Length of the prompt of each adapter's first call, which brings it to host memory."""
CLI_SECONDS = 60
CHECK_S, IDLE_SHARE = 5.0, 0.25
"""Seconds between two looks at a service's processor time, and the share of a core below which it is idle."""
QUIET_S = 40.0
"""Seconds for which services must be idle: a node that was interrupted measures again after 30."""
IDLE_LIMIT_S = 900.0


@dataclass(frozen=True)
class Node:
    """A service's node, as `garnish nodes --json` reports it."""

    cpu_workers: int
    reason: str
    itemsize: int


class Adapters:
    """Adapters on q, k, v with random weights, `counts` of each rank. Functions are named a0, a1, ... in that order."""

    def __init__(self, model: Path, root: Path, counts: dict[int, int], seed: int) -> None:
        ranks = [rank for rank, count in counts.items() for _ in range(count)]
        self.model, self.vocabulary = model, load_base_model(model, model.name).vocab_size
        self.paths = make_adapters(model, root, ranks, seed, dtype=torch.bfloat16)
        self.of_rank = {rank: [i for i, adapter_rank in enumerate(ranks) if adapter_rank == rank] for rank in counts}
        self.numbers: dict[str, int] = {}

    def file_bytes(self, rank: int) -> int:
        return (self.paths[self.of_rank[rank][0]] / "adapter_model.safetensors").stat().st_size


def service_file(model: Path, **node: str) -> str:
    """Returns a serverless.yml that names the base model, and says `node` of the node."""
    stated = ", ".join(f"{key}: {value}" for key, value in node.items())
    return f"service: bench\nbase_model: {model}\n" + (f"node: {{{stated}}}\n" if node else "")


@contextmanager
def running(
    root: Path, adapters: Adapters, functions: Sequence[int], costs: Path | None, *, quick: bool, **node: str
) -> Iterator[HttpService]:
    """Yields a service in which these functions are deployed and their adapters lie in host memory.

    Its node has measured what `costs`, from another service, lack. `quick`: it may still be measuring.
    """
    service = HttpService(adapters.model, [], root, "auto", 0, file=service_file(adapters.model, **node))
    if costs is not None:
        service.use_costs(costs)
    with service:
        with Client(service.url, service.key) as client:
            for i in functions:
                adapters.numbers[client.deploy(f"a{i}", adapters.paths[i]).digest] = i
        asyncio.run(_call_once(service, functions))
        if not quick:
            asyncio.run(until_measured(service))
        yield service


async def until_idle(services: Iterable[HttpService]) -> None:
    """Waits until no service has computed anything for QUIET_S: then no node measures any more. Raises TimeoutError."""
    pids, quiet = [service.pid for service in services], 0.0
    until, before = time.monotonic() + IDLE_LIMIT_S, _processor_seconds(pids)
    while quiet < QUIET_S:
        if time.monotonic() > until:
            raise TimeoutError(f"some node still computes after {IDLE_LIMIT_S:.0f} s without calls")
        await asyncio.sleep(CHECK_S)
        now = _processor_seconds(pids)
        idle = all(late - early < IDLE_SHARE * CHECK_S for early, late in zip(before, now, strict=True))
        quiet, before = (quiet + CHECK_S if idle else 0.0), now


def _processor_seconds(pids: Iterable[int]) -> list[float]:
    return [sum(seconds for seconds, _ in service_usage(pid).values()) for pid in pids]


async def _call_once(service: HttpService, functions: Sequence[int]) -> None:
    prompt = tuple(range(10, 10 + FIRST_TOKENS))
    async with open_session(service.key) as session:
        call = Caller(session, service.url, [], max_tokens=1)
        check(await closed_loop(call, [Planned(f"a{i}", prompt) for i in functions], 1))


class Residency:
    """Looks up the tier of adapters on a service's only node. `session` has an operator's key."""

    def __init__(self, session: aiohttp.ClientSession, url: str, numbers: Mapping[str, int]) -> None:
        """`numbers`: of the functions, by digest."""
        self._session, self._numbers = session, numbers
        self._url = f"{url}/nodes/node-1/adapters"

    async def in_host(self) -> set[int]:
        """Returns the functions whose adapter is in host memory, and neither on the device nor on its way to it."""
        async with self._session.get(self._url, raise_for_status=True) as reply:
            listed = (await reply.json())["adapters"]
        waits = [each for each in listed if each["tier"] == "host" and each["layers"] is None]
        return {self._numbers[each["digest"]] for each in waits if each["digest"] in self._numbers}


def node_of(service: HttpService) -> Node:
    """Returns what the command line says of the service's only node."""
    command = [str(Path(sys.executable).parent / "garnish"), "nodes", "--json"]
    done = subprocess.run(command, cwd=service.root, capture_output=True, text=True, timeout=CLI_SECONDS)
    if done.returncode:
        raise RuntimeError(f"garnish nodes failed: {done.stderr}")
    (node,) = json.loads(done.stdout)["nodes"]
    record: dict[str, Any] = node["record"]
    return Node(record["cpu_workers"], record["cpu_workers_reason"], record["adapter_itemsize"])
