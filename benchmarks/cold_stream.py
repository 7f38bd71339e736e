"""A first call whose adapter is in S3 only: how near its first token comes to the earliest time that is possible.

The adapter is really read from an S3 server (moto's, a process of its own); a simulated link in front of it sets how
long that takes at least. Ideal: each layer is computed, at its warm speed, as soon as it and all before it can be:
max over layers i of (arrival of i + warm compute of i..N).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from adapters.artifact import LayerBlock
from benchmarks.cold_bench import TOKENS
from benchmarks.cold_rig import TARGETS, Rig, draw_prompt
from benchmarks.report import ROOT, rounds_until
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.cold_starts import ColdStartMode
from node_agent.config import LinkConfig
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import make_adapter

RATIOS = (0.25, 0.5, 1.0, 2.0, 7.0)
"""Fetch : warm prefill."""
RANK = 64
BUCKET = "garnish-bench"
WAYS = {"stream": ColdStartMode(("pipeline",)), "download": ColdStartMode(("wait",))}


class Arrivals:
    """Arrival times of one adapter's layers in host memory."""

    def __init__(self) -> None:
        self._watched: tuple[AdapterStore, str] | None = None
        self.at: dict[int, float] = {}
        """arrival by layer, seconds of time.perf_counter"""

    def changed(self) -> None:
        """Notes the layers that have come. Called by whatever thread brought a layer on."""
        now, watched = time.perf_counter(), self._watched
        host = watched[0].hosts.get(watched[1]) if watched is not None else None
        for layer in [i for i, there in enumerate(host.here if host is not None else b"") if there]:
            self.at.setdefault(layer, now)

    @contextmanager
    def of(self, rig: Rig, adapter: int) -> Iterator[None]:
        self.at, self._watched = {}, (rig.engine.engine.store, rig.adapters[adapter].digest)
        try:
            yield
        finally:
            self._watched = None


def streaming(model: Path, root: Path, rounds: int, seed: int, until: float) -> dict[str, Any]:
    arrivals = Arrivals()
    config: dict[str, Any] = {"r": RANK, "lora_alpha": RANK, "target_modules": TARGETS}
    adapter = make_adapter(model, root / "streamed", seed, torch.bfloat16, **config)
    cores = os.sched_getaffinity(0)
    with s3_server(max(cores)) as url:
        os.sched_setaffinity(0, {max(cores)})  # where the threads that load are to stay
        engine = LocalEngine(
            model, url, on_change=arrivals.changed, dtype="bfloat16", threads=1, cpu_workers=0, cold_start="pipeline",
            store_link=LinkConfig(1e12),
        )  # fmt: skip
        try:
            rig = Rig(engine, [engine.deploy(adapter)])
            os.sched_setaffinity(0, {min(cores)})
            return {"part": "stream", "tokens": TOKENS, "rank": RANK, **_measure(rig, arrivals, rounds, until)}
        finally:
            engine.close()
            os.sched_setaffinity(0, cores)


def _measure(rig: Rig, arrivals: Arrivals, rounds: int, until: float) -> dict[str, Any]:
    prompt, store = draw_prompt(rig.engine, TOKENS), rig.engine.engine.store
    host = store.hosts.get(rig.adapters[0].digest)
    assert host is not None and host.header is not None  # it is in host memory
    blocks, size = host.header.layers, sum(block.size for block in host.header.layers)
    rows: list[dict[str, Any]] = [{"ratio": ratio, "ways": {}} for ratio in RATIOS]
    for index in rounds_until(until, rounds + 1, least=2):  # the first warms
        for row in rows:
            warm = median(rig.first_tokens(prompt, [0])[0].sample.ttft for _ in range(3))
            rate = size / (row["ratio"] * warm)
            store.loader.store_link.config = LinkConfig(rate)
            for name, way in WAYS.items():
                if name == "download" and row["ratio"] > 1:
                    continue
                engine = rig.engine.engine
                engine.cold_start.mode = way
                _forget(rig)
                with arrivals.of(rig, 0):
                    (served,) = rig.first_tokens(prompt, [0])
                if index:
                    ttft, sent = served.sample.ttft, served.sample.sent
                    came = {layer: at - sent for layer, at in arrivals.at.items()}
                    row["ways"].setdefault(name, []).append(
                        {
                            "ttft_s": ttft, "warm_s": warm, "ideal_s": ideal(blocks, rate, warm),
                            "ideal_as_arrived_s": earliest(came, warm, len(blocks)), "fetched_s": max(came.values()),
                        }
                    )  # fmt: skip
    store.loader.store_link.config = None
    return {"bytes": size, "rows": rows}


def ideal(blocks: Sequence[LayerBlock], rate: float, warm: float) -> float:
    """Seconds to the first token, had the link carried the layers from the start and nothing else taken time."""
    came, arrived = 0, {}
    for layer, block in enumerate(blocks):
        came += block.size
        arrived[layer] = came / rate
    return earliest(arrived, warm, len(blocks))


def earliest(arrived: dict[int, float], warm: float, layers: int) -> float:
    """Seconds to the first token, if each layer is computed at its warm speed as soon as it may be."""
    return max(at + warm * (layers - layer) / layers for layer, at in arrived.items())


def _forget(rig: Rig) -> None:
    """The adapter is nowhere but in the store."""
    rig.forget_device()
    store = rig.engine.engine.store
    host = store.hosts.get(rig.adapters[0].digest)
    if host is not None:
        store.hosts.forget(host)


def streaming_figures(row: dict[str, Any]) -> dict[str, float]:
    """Medians over rounds. `stream_over_ideal` is the worst of the ratios; `_as_arrived` counts from what the S3 server
    really delivered."""
    found: dict[str, float] = {}
    for one in row["rows"]:
        streamed = one["ways"]["stream"]
        for name in ("ideal", "ideal_as_arrived"):
            ratio = median(each["ttft_s"] / each[f"{name}_s"] for each in streamed)
            found[f"stream_over_{name}_{one['ratio']:g}"] = ratio
        if "download" in one["ways"]:
            pairs = zip(one["ways"]["download"], streamed, strict=True)
            found[f"stream_gain_{one['ratio']:g}"] = median(a["ttft_s"] / b["ttft_s"] for a, b in pairs)
    found["stream_over_ideal"] = max(found[f"stream_over_ideal_{ratio:g}"] for ratio in RATIOS)
    found["stream_gain"] = found["stream_gain_1"]
    return found


@contextmanager
def s3_server(core: int, *, in_memory: bool = True) -> Iterator[str]:
    """An s3:// URL of a bucket on a server of its own, on this core; boto3's environment points to it meanwhile.

    `in_memory`: whether the server may keep objects of up to 5 MB in memory; else they are files, too."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "s3_server.py")]
    before = dict(os.environ)
    env = before if in_memory else before | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 14)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            for task in Path(f"/proc/{server.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                del os.environ[name]
            os.environ |= {
                "AWS_ENDPOINT_URL_S3": url, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            }  # fmt: skip
            request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
            with urllib.request.urlopen(request, timeout=60):
                yield f"s3://{BUCKET}/registry"
        finally:
            os.environ.clear()
            os.environ.update(before)
            server.stdin.close()
