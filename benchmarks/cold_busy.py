"""Cold starts of the whole service on a busy host: the engine on the first core; CPU worker, loaders, gateway, node API
and client together on the last.

Two services, alike but for the device's memory: one holds every adapter and was called with each; the other holds so
few that calls in turn never find theirs. They are called in turns; the one that is not called sleeps.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.cold_bench import LOAD_OVER_PREFILL
from benchmarks.cold_rig import make_adapters
from benchmarks.http_service import HttpService
from benchmarks.latency import Sample
from benchmarks.load import WORDS, OpenAiServer, Planned, open_loop, open_session
from benchmarks.report import rounds_until
from benchmarks.workloads import SETTINGS, chat_lengths

SETTING = SETTINGS["S3"]
OUTPUT = 12
MOST_PROMPT = 1024
ADAPTERS = 12
RESIDENT = 5
"""Adapters that the colder service's device holds."""
ENGINE = "node_agent.engine_process"
PAGE_SLACK = 1.1
WARM = 3


def busy_host(model: Path, root: Path, rounds: int, calls: int, seed: int, until: float) -> dict[str, Any]:
    adapters = make_adapters(model, root / "adapters", [SETTING.ranks[0]] * ADAPTERS, seed)
    size = (adapters[0] / "adapter_model.safetensors").stat().st_size // 2  # fp32 files, a bf16 device
    rate, prefill = _link(model, root / "probe", adapters[:1], size)
    node = f", cpu_workers: 1, simulate: {{link: {round(rate)}B/s}}"
    with ExitStack() as stack:
        services = {
            name: stack.enter_context(
                HttpService(model, adapters, root / name, "bfloat16", 1, f"{node}, adapter_memory: {memory}")
            )
            for name, memory in (("cached", 1 << 30), ("full", round(RESIDENT * PAGE_SLACK * size)))
        }
        for service in services.values():
            asyncio.run(_call_each(service))
        stack.enter_context(confined([service.pid for service in services.values()]))
        found = asyncio.run(_rounds(services, rounds, calls, seed, until))
    return {"part": "busy", "link_bytes_s": rate, "warm_prefill_s": prefill, "adapters": ADAPTERS, **found}


def _link(model: Path, root: Path, adapters: list[Path], size: int) -> tuple[float, float]:
    """(bytes per second of the link, seconds of a warm prefill of 256 tokens over HTTP)."""
    with HttpService(model, adapters, root, "bfloat16", 1, ", cpu_workers: 1") as service:
        asyncio.run(_call_each(service))
        with confined([service.pid]):
            times = [service.run((0,), 256, 1)[0] for _ in range(WARM + 1)][1:]
    return size / (LOAD_OVER_PREFILL * median(times)), median(times)


async def _rounds(services: dict[str, HttpService], rounds: int, calls: int, seed: int, until: float) -> dict[str, Any]:
    rng, at = np.random.default_rng([seed, 7]), 0
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in services}
    gap = 0.0
    for index in rounds_until(until, rounds):
        words = random.Random(f"{seed}.{index}")
        lengths = np.minimum(chat_lengths(calls, rng), MOST_PROMPT)
        planned = [
            Planned(f"a{(at + i) % ADAPTERS}", " ".join(words.choices(WORDS.split(), k=int(length))))
            for i, length in enumerate(lengths)
        ]
        at += calls
        if not gap:
            begin = time.perf_counter()
            await _run(services["cached"], planned, [0.0] * calls)
            gap = (time.perf_counter() - begin) / calls / SETTING.utilisation
        due = [float(t) for t in np.cumsum(rng.exponential(gap, calls))]
        names = list(services) if index % 2 else list(services)[::-1]
        for name in names:
            samples = await _run(services[name], planned, due)
            found[name].append({kind: mean(getattr(s, kind) for s in samples) for kind in ("ttft", "tpt", "e2e")})
    return {"calls": calls, "gap_s": gap, "rounds": found}


async def _run(service: HttpService, planned: Sequence[Planned], due: Sequence[float]) -> list[Sample]:
    async with open_session(service.key) as session:
        samples = await open_loop(OpenAiServer(session, service.url, OUTPUT), planned, due)
    bad = [sample.error for sample in samples if sample.error]
    if bad:
        raise RuntimeError(f"calls ended with {bad}")
    return samples


async def _call_each(service: HttpService) -> None:
    """One after the other, so that the last ones are on the device."""
    for i in range(len(service.adapters)):
        await _run(service, [Planned(f"a{i}", WORDS)], [0.0])


@contextmanager
def confined(pids: Sequence[int]) -> Iterator[None]:
    """The threads that compute in these processes' engines on the first core; all their others, and ours, on the last.
    Children of theirs inherit it."""
    cores = os.sched_getaffinity(0)
    for pid in [os.getpid(), *(child for service in pids for child in descendants(service))]:
        engine = ENGINE in _command(pid)
        for task in Path(f"/proc/{pid}/task").iterdir():
            main = int(task.name) == pid
            os.sched_setaffinity(int(task.name), {min(cores) if engine and main else max(cores)})
    try:
        yield
    finally:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += descendants(int(child))
    return found


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def busy_figures(row: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in ("ttft", "tpt", "e2e"):
        pairs = zip(row["rounds"]["full"], row["rounds"]["cached"], strict=True)
        ratios = [one[kind] / ref[kind] for one, ref in pairs]
        found[f"{kind}_over_cached_full_busy"] = median(ratios)
        found[f"{kind}_over_cached_full_busy_max"] = max(ratios)
    return found
