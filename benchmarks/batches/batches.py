"""A batch over many adapters, its calls grouped by adapter as the service has them, over the file's own order.

200 adapters of rank 64 on q, k and v, a pool for a tenth of them, a link of EVALUATION's scale: a rank-64 adapter takes
0.68 of a warm prefill of 256 tokens. Calls have 60 tokens in and 20 out, shuffled over the adapters. One gateway and
one node, which serve both orders by turns and nothing else, once the node has measured its costs; in file order
everything else of a batch is the same. Then one caller sends an interactive call of one function after another, alone
and while a batch of the file's first lines runs, grouped.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoConfig

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.local_store import LocalStore
from adapters.registry import Registry
from adapters.tenants import Tenants
from benchmarks.common.adapters import LOAD_OVER_PREFILL, make_adapters
from benchmarks.common.gateway_process import gateway_process
from benchmarks.common.processes import process
from benchmarks.common.report import SMOLLM2, arguments, report, run_study
from cluster.news import RECORD_EXPIRY
from garnish.calls import batch_call, content_call, create_call, upload_call
from garnish.client import Client
from gateway.batches.messages import ENDED, Batch, FileObject
from node_agent.adapter_memory.pages import choose_page_size

GATEWAY = """
import sys, msgspec
from array import array
from pathlib import Path
from gateway.batches.lines import LineScanner
from gateway.config import GatewayConfig
from gateway.server import run
config = msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig)
grouped, file_order = LineScanner.order, Path(config.tmp_dir).with_name("file_order")
def order(self):
    return array("l", range(len(self.starts))) if file_order.exists() else grouped(self)
LineScanner.order = order
run(config)
"""
TENANT = "bench"
NODE_SECONDS = 180.0
MEASURED, MEASURE_SECONDS = "performance model measured", 900.0
"""Log line of a node that knows its costs. It measures them while it is idle; until then batches get few rows."""
WARM_PREFILLS = 5
PREFILL_TOKENS = 256
PROMPT_TOKENS = 60
ROW_PADDING = 1.02
"""Memory of an adapter over its bytes, without the padding to whole pages."""
BATCH_SECONDS = 1800.0
ALONE_CALLS = 60
PAUSE_SECONDS = 0.2
JOINED = 32
"""Answers within which cold calls of one function are taken to have waited for one load: more than run at once."""


@dataclass(frozen=True)
class Size:
    adapters: int
    rank: int
    calls: int
    pool: int
    """adapters that fit on the device"""
    during_batch: int
    """calls of the batch that runs while interactive calls are made"""


FULL, QUICK = Size(200, 64, 600, 20, 100), Size(6, 8, 48, 2, 16)


class Bed:
    """A registry with the adapters `a0`, `a1`, ..., a gateway, and nodes that are started later."""

    def __init__(self, model: Path, adapters: Sequence[Path], root: Path) -> None:
        self.root, self.model, self.base = root, model, load_base_model(model, model.name)
        store = LocalStore(root / "registry")
        tenants, registry = Tenants(store), Registry(store, self.base)
        tenants.put(TENANT)
        self.key = tenants.add_key(TENANT)[0]
        self.adapter_bytes = 0
        for number, folder in enumerate(adapters):
            config, weights = (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors"
            self.adapter_bytes = registry.deploy(TENANT, f"a{number}", AdapterUpload(config, weights)).bytes
        self.url = ""

    @contextmanager
    def gateway(self) -> Iterator[None]:
        with gateway_process(self.model, str(self.root / "registry"), self.root, code=GATEWAY) as gateway:
            gateway.wait_until_ready("/healthz")
            self.url = gateway.url
            yield

    @contextmanager
    def node(self, name: str, **settings: Any) -> Iterator[None]:
        file = self.root / f"{name}.yml"
        service = {
            "service": "bench", "base_model": str(self.model), "registry": str(self.root / "registry"),
            "node": {"device": "cpu", "dtype": "auto", "kv_memory": "256MiB", **settings},
        }  # fmt: skip
        file.write_text(json.dumps(service))
        command = ["-m", "garnish.cli.main", "node", "-f", str(file), "--gateway", self.url, "--node-id", name]
        command += ["--secret-file", str(self.root / "secret"), "--state", str(self.root / name)]
        with process(command, None, self.root / f"{name}.log") as running:
            deadline = time.monotonic() + NODE_SECONDS
            while httpx.get(f"{self.url}/readyz", timeout=10).status_code != 200:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the node did not start:\n{(self.root / f'{name}.log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield
        time.sleep(2 * RECORD_EXPIRY)  # until the gateway knows that it has gone

    def wait_until_measured(self, node: str) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + MEASURE_SECONDS
        while MEASURED not in (self.root / f"{node}.log").read_text():
            if time.monotonic() > deadline:
                raise TimeoutError("the node does not end measuring its costs")
            time.sleep(1)

    def ttft(self, function: str, prompt_tokens: int) -> float:
        """Seconds from receipt to the first token of one call, by the service."""
        with Client(self.url, self.key) as client:
            reply = client.invoke(function, [7] * prompt_tokens, max_tokens=2, ignore_eos=True)
        assert reply.timing.ttft_ms is not None
        return reply.timing.ttft_ms / 1e3

    def run_batch(self, file: Path, *, grouped: bool) -> tuple[float, list[dict[str, Any]]]:
        """Returns the seconds from its creation to its end, and its answers as they ended."""
        marker = self.root / "file_order"
        marker.unlink(missing_ok=True) if grouped else marker.touch()
        with Client(self.url, self.key) as client:
            with upload_call(file) as call:
                uploaded = client.ask(call, FileObject)
            begin = time.perf_counter()
            batch = client.ask(create_call(uploaded.id, "/invoke"), Batch)
            while batch.status not in ENDED:
                if time.perf_counter() - begin > BATCH_SECONDS:
                    raise TimeoutError(f"the batch does not end: {batch}")
                time.sleep(0.1)
                batch = client.ask(batch_call(batch.id), Batch)
            seconds = time.perf_counter() - begin
            if batch.status != "completed" or batch.output_file_id is None or batch.request_counts.failed:
                raise RuntimeError(f"the batch did not complete: {batch}")
            content = b"".join(client.download(content_call(batch.output_file_id)))
        return seconds, [json.loads(line)["response"]["body"] for line in content.splitlines()]


def write_calls(file: Path, size: Size, seed: int) -> None:
    """60 tokens in and 20 out, as often of each adapter, shuffled."""
    rng = random.Random(seed)
    functions = [f"a{number % size.adapters}" for number in range(size.calls)]
    rng.shuffle(functions)
    with file.open("w") as out:
        for number, function in enumerate(functions):
            prompt = [rng.randrange(100, 500) for _ in range(PROMPT_TOKENS)]
            body = {"model": function, "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
            call = {"custom_id": str(number), "method": "POST", "url": "/invoke", "body": body}
            out.write(json.dumps(call) + "\n")


def loads_of(answers: Sequence[dict[str, Any]]) -> int:
    """Returns the number of loads. Cold calls of a function that ended close together waited for the same one."""
    loads, last = 0, dict[str, int]()
    for index, answer in enumerate(answers):
        if answer["timing"]["cold_start"]["state"] != "none":
            function = answer["function"]
            loads += index - last.get(function, -JOINED) >= JOINED
            last[function] = index
    return loads


async def call_until(bed: Bed, ends: asyncio.Event) -> list[float]:
    """Makes interactive calls, one after another until the event. Returns their TTFTs."""
    ttfts: list[float] = []
    while not ends.is_set() or not ttfts:
        ttfts.append(await asyncio.to_thread(bed.ttft, "a0", PROMPT_TOKENS))
        await asyncio.sleep(PAUSE_SECONDS)
    return ttfts


def measured(bed: Bed, file: Path, *, grouped: bool) -> dict[str, Any]:
    seconds, answers = bed.run_batch(file, grouped=grouped)
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return {"grouped": grouped, "seconds": seconds, "tokens_per_second": tokens / seconds, "loads": loads_of(answers)}


async def interactive(bed: Bed, file: Path) -> dict[str, list[float]]:
    """Returns TTFTs, in seconds, alone and while a batch of the file's calls runs."""
    alone = [await asyncio.to_thread(bed.ttft, "a0", PROMPT_TOKENS) for _ in range(ALONE_CALLS)]
    ends = asyncio.Event()
    ttfts = asyncio.create_task(call_until(bed, ends))
    try:
        await asyncio.to_thread(bed.run_batch, file, grouped=True)
    finally:
        ends.set()
    return {"alone_s": alone, "beside_s": await ttfts}


def figures_of(rows: Sequence[dict[str, Any]], ttfts: dict[str, list[float]], adapters: int) -> dict[str, float]:
    """Medians over the rounds; 95th percentiles of interactive first tokens."""
    alone, together = (float(np.percentile(ttfts[name], 95)) * 1e3 for name in ("alone_s", "beside_s"))

    def of(name: str, *, grouped: bool) -> float:
        return float(median(row[name] for row in rows if row["grouped"] is grouped))

    grouped, file_order = (of("tokens_per_second", grouped=each) for each in (True, False))
    return {
        "tokens_per_second": grouped,
        "over_file_order": grouped / file_order,
        "loads_over_adapters": of("loads", grouped=True) / adapters,
        "file_order_loads_over_adapters": of("loads", grouped=False) / adapters,
        "alone_ttft_p95_ms": alone,
        "interactive_ttft_p95_ms": together,
        "interactive_ttft_p95_ratio": together / alone,
    }


def link_rate(bed: Bed) -> float:
    """Bytes per second."""
    with bed.node("unscaled"):
        base = bed.base.id
        prefill = median(bed.ttft(base, PREFILL_TOKENS) for _ in range(WARM_PREFILLS + 1))
    return bed.adapter_bytes / (LOAD_OVER_PREFILL * prefill)


def study(options: Any, root: Path) -> dict[str, Any]:
    size, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    dtype = AutoConfig.from_pretrained(options.model).dtype or torch.float32
    folders = make_adapters(options.model, root, [size.rank] * size.adapters, options.seed, dtype=dtype)
    bed, file = Bed(options.model, folders, root), root / "calls.jsonl"
    write_calls(file, size, options.seed)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(bed.gateway())
        rate = 20e6 if options.quick else link_rate(bed)
        page = choose_page_size(bed.base, dtype.itemsize)
        memory = f"{size.pool * ceil(ROW_PADDING * bed.adapter_bytes / page) * page}B"
        simulated = {"link": f"{round(rate / 1e6, 3)}MB/s"}
        stack.enter_context(bed.node("scaled", adapter_memory=memory, host_memory="4GiB", simulate=simulated))
        if not options.quick:
            bed.wait_until_measured("scaled")
        for _ in range(rounds):
            for grouped in (True, False):
                rows.append(measured(bed, file, grouped=grouped))
        part = file.with_name("part.jsonl")
        part.write_text("".join(file.read_text().splitlines(keepends=True)[: size.during_batch]))
        ttfts = asyncio.run(interactive(bed, part))
    settings = {
        "model": options.model.name,
        **vars(size),
        "rounds": rounds,
        "link_mb_per_s": rate / 1e6,
        "quick": options.quick,
    }
    figures = figures_of(rows, ttfts, size.adapters)
    return report("batches", settings | ttfts, options.seed, rows, figures, simulated=True)


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--rounds", type=int, default=3, help="of both orders")
    options = parser.parse_args()
    run_study(study, options)


if __name__ == "__main__":
    main()
