"""Errors of the simulator: two real nodes of one core each, at loads of up to 0.3, against their simulation.

The host is profiled by `garnish profile` on one core, and the service started with two nodes of one thread, which
publish that performance model. The profile's `overhead` is what HTTP, the gateway and the nodes' processes add before a
first token; earlier calls of one token show it. Then, at each load, some calls are sent first, so that the nodes'
models follow the host. A trace is sent to the service in an open loop, and simulated with the model that was published
before it, and the same policy.

`ttft_error`, `tpt_error`: of the means, relative; `attain_gap`: difference of the shares within 1.5 x the base's TPT;
`speedup_over_real_time`: the trace's length over the simulation's.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample
from benchmarks.common.report import ROOT, SMOLLM2, ContentionProbe, arguments, publish, report
from benchmarks.scheduling.testbed import Bed, play
from cluster.news import NodeRecord
from cluster.node_table import ASSUMED
from cluster.performance_model import PerformanceModel
from cluster.text import BaseText
from garnish.simulation.job import TraceRequest
from garnish.simulation.outcome import values
from garnish.simulation.profile import NodeProfile
from garnish.simulation.slo import DEFAULT_SLO, parse_slo
from garnish.simulation.study import default_policy, simulate

NODES, QUICK_NODES = 2, 1
READY_SECONDS = 120.0
LOADS = (0.1, 0.2, 0.3)
PROMPTS, ANSWERS = (8, 96), (8, 48)
ADAPTERS = 4
HOST_MEMORY = 1 << 30
"""default of serverless.yml"""
CALIBRATING = 12
WARM_UP = 24


def measure_host(service: HttpService, earlier: Path | None) -> None:
    """The profiles of the nodes that the service will have, measured with one node's share of the cores."""
    folder = service.root / ".garnish" / "profiles"
    if earlier is None:
        garnish = Path(sys.executable).parent / "garnish"
        command = [str(garnish), "profile", "--node-id", "node-1", "--host-nodes", str(NODES)]
        subprocess.run(command, cwd=service.root, check=True, timeout=1800)
    else:
        folder.mkdir(parents=True, exist_ok=True)
    for file in list((earlier or folder).glob("node-1.*")):
        if earlier is not None:
            shutil.copyfile(file, folder / file.name)
        for number in range(2, NODES + 1):
            shutil.copyfile(file, folder / file.name.replace("node-1", f"node-{number}"))


def node_profile(record: NodeRecord, assume: bool) -> NodeProfile:
    """Returns the profile of a node's record. `assume`: it need not have measured itself, and figures mean nothing."""
    performance = record.performance or (ASSUMED if assume else None)
    if performance is None:
        raise RuntimeError(f"the record of {record.id} has no performance model")
    key = performance.key
    return NodeProfile(
        title=f"{record.base_id} on {key.hardware}",
        source="measured",
        notes=f"As a node of Garnish {key.garnish} told of itself; kernel {key.kernel}, {key.dtype}.",
        performance=performance,
        max_rows=record.max_rows,
        queue_limit=record.queue_limit,
        max_context=record.max_context,
        block_tokens=record.block_tokens,
        kv_tokens=record.kv_blocks * record.block_tokens,
        adapter_memory=record.adapter_bytes,
        host_memory=HOST_MEMORY,
        bytes_per_rank=1,
    )


def records(service: HttpService, nodes: int) -> list[NodeRecord]:
    """Returns the records of all nodes, once each is ready. Raises TimeoutError."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        listed = _records(service)
        if len(listed) == nodes and all(record.state == "ready" for record in listed):
            return listed
        time.sleep(0.2)
    raise TimeoutError(f"of {nodes} nodes some are not ready after {READY_SECONDS:g} s")


def _records(service: HttpService) -> list[NodeRecord]:
    with service.client(admin=True) as operator:
        nodes = operator.get("/nodes").raise_for_status().json()["nodes"]
    return [msgspec.convert({**node["record"], "strict": None}, NodeRecord) for node in nodes]


def draw(rate: float, count: int, adapters: list[tuple[str, int, int]], rng: np.random.Generator) -> list[TraceRequest]:
    """Poisson arrivals; lengths even between the bounds; every adapter equally often."""
    times = np.cumsum(rng.exponential(1 / rate, count))
    prompts, answers = rng.integers(*PROMPTS, count), rng.integers(*ANSWERS, count)
    called = rng.integers(0, len(adapters), count)
    return [
        TraceRequest(float(at), adapters[a][0], adapters[a][1], int(prompt), int(answer), bytes=adapters[a][2])
        for at, a, prompt, answer in zip(times, called, prompts, answers, strict=True)
    ]


def overhead_of(testbed: Bed, profile: NodeProfile, name: str, words: float) -> float:
    """Returns the seconds of a call's first token beyond its prefill."""
    calls = [TraceRequest(i * 0.2, name, 0, PROMPTS[0], 1) for i in range(CALIBRATING)]
    samples = asyncio.run(play(testbed, calls, words, stream=True))
    prompt = samples[-1].prompt_tokens
    prefill = profile.performance.prefill.seconds(prompt, prompt**2, 0)
    return max(0.0, median(_good(samples)[i].ttft for i in range(2, CALIBRATING)) - prefill)


def _good(samples: list[Sample]) -> list[Sample]:
    failed = [sample.error for sample in samples if sample.error]
    if failed:
        raise RuntimeError(f"calls failed: {sorted(set(failed))}")
    return samples


def compare(
    testbed: Bed, profile: NodeProfile, requests: list[TraceRequest], words: float, load: float, nodes: int
) -> dict[str, Any]:
    """The trace on the service and simulated. Prompts are as long as the service counted them."""
    samples = _good(asyncio.run(play(testbed, requests, words, stream=True)))
    counted = [
        msgspec.structs.replace(request, prompt_tokens=sample.prompt_tokens, output_tokens=sample.output_tokens)
        for request, sample in zip(requests, samples, strict=True)
    ]
    slo = parse_slo(DEFAULT_SLO, profile)
    assert slo.tpt is not None
    began = time.perf_counter()
    simulator, summary = simulate(counted, profile, nodes, default_policy(), slo)
    took = time.perf_counter() - began
    real = {"ttft": [sample.ttft for sample in samples], "tpt": [sample.tpt for sample in samples]}
    row: dict[str, Any] = {"load": load, "requests": len(samples), "speedup": requests[-1].at / took}
    for name, times in real.items():
        simulated = values(simulator.jobs, name, profile.overhead)
        row[f"{name}_real_ms"], row[f"{name}_simulated_ms"] = mean(times) * 1e3, float(simulated.mean()) * 1e3
        row[f"{name}_error"] = abs(float(simulated.mean()) / mean(times) - 1)
        row[f"{name}_p90_error"] = abs(float(np.percentile(simulated, 90)) / float(np.percentile(times, 90)) - 1)
    row["attain_real"] = mean(value <= slo.tpt for value in real["tpt"])
    row["attain_gap"] = abs(row["attain_real"] - summary.attainment)
    row["late_max_ms"] = max(sample.late or 0.0 for sample in samples) * 1e3
    return row


def capacity(profile: NodeProfile) -> float:
    """Requests/s of a mean request on one node, one after another."""
    prompt, answer = sum(PROMPTS) // 2, sum(ANSWERS) // 2
    model = profile.performance
    alone = model.prefill.seconds(prompt, prompt**2, 0) + answer * model.decode.seconds(1, prompt + answer // 2, 0)
    return 1 / alone


def measure(
    model_dir: Path, settings: dict[str, Any], seed: int, earlier: Path | None
) -> tuple[list[dict[str, Any]], NodeProfile]:
    """Returns rows, and the profile of the nodes' records."""
    rng, words = np.random.default_rng(seed), 100 / len(BaseText(model_dir).encode_prompt("the " * 100))
    paths = sorted((ROOT / "examples" / "adapters" / model_dir.name).iterdir())[:ADAPTERS]
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        nodes = settings["nodes"]
        options = ("--nodes", str(nodes))
        service = HttpService(model_dir, paths, Path(root) / "service", settings["dtype"], 1, options=options)
        if settings["profiled"]:
            measure_host(service, earlier)
        stack.enter_context(service)
        testbed = Bed(service.url, service.key, 1)
        profile = node_profile(records(service, nodes)[0], assume=not settings["profiled"])
        overhead = overhead_of(testbed, profile, "a0", words)
        adapters = functions_of(service, [f"a{i}" for i in range(len(paths))])
        per_rank = round(median(size / rank for _, rank, size in adapters))
        profile = msgspec.structs.replace(profile, overhead=overhead, bytes_per_rank=per_rank)
        rows = []
        for load in settings["loads"]:
            rate = settings.get("rate", load * nodes * capacity(profile))
            _good(asyncio.run(play(testbed, draw(rate, settings["warm_up"], adapters, rng), words, stream=True)))
            model = corrected(service, nodes, profile.performance)
            requests = draw(rate, max(12, int(rate * settings["seconds"])), adapters, rng)
            row = {"overhead_ms": overhead * 1e3, "corrected": model.decode.base / profile.performance.decode.base}
            now = msgspec.structs.replace(profile, performance=model)
            rows.append(row | compare(testbed, now, requests, words, load, nodes))
        return rows, profile


def corrected(service: HttpService, nodes: int, measured: PerformanceModel) -> PerformanceModel:
    """The model that has moved furthest from what was measured: a light load may have left the other node idle."""
    models = [record.performance for record in records(service, nodes) if record.performance is not None]
    return max(models, key=lambda model: abs(model.decode.base / measured.decode.base - 1), default=measured)


def functions_of(service: HttpService, names: list[str]) -> list[tuple[str, int, int]]:
    """(name, rank, bytes) of each."""
    with service.client() as client:
        listed = client.get("/functions").raise_for_status().json()["functions"]
    by_name = {function["name"]: function for function in listed}
    return [(name, max(by_name[name]["ranks"], default=0), by_name[name]["bytes"]) for name in names]


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--profile", type=Path, help="write what the nodes told here, as a profile for simulations")
    parser.add_argument("--earlier", type=Path, metavar="DIR", help="profiles/ of an earlier `garnish profile`, reused")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "loads": LOADS, "seconds": 180.0, "warm_up": WARM_UP, "profiled": True, "nodes": NODES,
    }  # fmt: skip
    if options.quick:
        settings = {
            "loads": LOADS[-1:], "seconds": 2.0, "warm_up": 2, "profiled": False, "rate": 6.0, "nodes": QUICK_NODES,
        }  # fmt: skip
        if options.profile is not None:
            parser.error("--quick profiles nothing: --profile would write assumed numbers")
    settings |= {"dtype": options.dtype, "model": options.model.name, "policy": default_policy()}
    probe = ContentionProbe()
    rows, profile = measure(options.model, settings, options.seed, options.earlier)
    if options.profile is not None:
        options.profile.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    figures = {
        **{f"{name}_error": max(row[f"{name}_error"] for row in rows) for name in ("ttft", "tpt")},
        "attain_gap": max(row["attain_gap"] for row in rows),
        "speedup_over_real_time": min(row["speedup"] for row in rows),
    }
    settings |= probe.values()
    publish(report("fidelity", settings, options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
