"""Time from the deploy of a new version to its first token, and what such deploys cost calls of other functions.

    python -m benchmarks.push.push --json benchmarks/results/push.json

An adapter of rank 16 on q, k and v is deployed again and again with changed weights, and called at once. First alone,
ROUNDS times. Then once a second for `--minutes` minutes, in windows that alternate with windows without deploys, while
another function is called at Poisson arrivals. The gateway and the node have a core each.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from benchmarks.common.adapters import make_adapters
from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample
from benchmarks.common.load import OpenAiServer, open_loop, open_session, plan, poisson
from benchmarks.common.report import ROOT, ContentionProbe, arguments, publish, report
from benchmarks.engines.pinning import pin
from tests.support.processes import processes, tree

NAME = "policy"
RANK = 16
WINDOW_S = 30.0
FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass
class Pushes:
    """Deploys of a function whose weights change each time."""

    client: httpx.Client
    folder: Path
    count: int = 0

    def __post_init__(self) -> None:
        self._config, self._weights = ((self.folder / name).read_bytes() for name in FILES)

    def push(self) -> tuple[int, float]:
        """Deploys the next version. Returns its number, and the seconds from the request's first byte to the reply."""
        self.count += 1
        changed = self._weights[:-4] + np.float32(self.count * 1e-6).tobytes()
        files = {name: (name, data) for name, data in zip(FILES, (self._config, changed), strict=True)}
        began = time.perf_counter()
        reply = self.client.post(f"/deploy/{NAME}", files=files).raise_for_status().json()
        return int(reply["version"]), time.perf_counter() - began

    def push_and_call(self) -> dict[str, Any]:
        """Deploys the next version, and calls the function until its first token."""
        began = time.perf_counter()
        version, deploy_s = self.push()
        body = {"prompt": "Once upon a time", "max_tokens": 4, "stream": True}
        first_s, served = 0.0, 0
        with self.client.stream("POST", f"/invoke/{NAME}", json=body) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data:"):
                    first_s = first_s or time.perf_counter() - began
                    served = json.loads(line[5:]).get("version", served)
        if served != version:
            raise RuntimeError(f"version {served} answered after version {version} was deployed")
        return {"part": "alone", "deploy_s": deploy_s, "first_token_s": first_s}

    def every_second(self, stop: threading.Event, late: list[float]) -> None:
        """Deploys once a second until `stop`. `late` gets the seconds by which each deploy ended after its second."""
        start = time.monotonic()
        for number in range(1 << 30):
            if stop.wait(max(0.0, start + number - time.monotonic())):
                return
            self.push()
            late.append(max(0.0, time.monotonic() - start - number - 1))


def measure_windows(service: HttpService, pushes: Pushes, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each window, with the latencies of the other function's calls."""
    rows = []
    for number in range(settings["windows"]):
        pushing = number % 2 == 0
        stop, late = threading.Event(), list[float]()
        thread = threading.Thread(target=pushes.every_second, args=(stop, late))
        before = pushes.count
        if pushing:
            thread.start()
        samples = asyncio.run(call_other_function(service, settings, number))
        stop.set()
        if pushing:
            thread.join(60)
        rows.append(
            {
                "part": "beside",
                "pushing": pushing,
                "pushes": pushes.count - before,
                "late_s": max(late, default=0.0),
                "ttft_s": [sample.ttft for sample in samples],
                "e2e_s": [sample.end - sample.sent for sample in samples],
                **stored(service),
            }
        )
    return rows


async def call_other_function(service: HttpService, settings: dict[str, Any], number: int) -> list[Sample]:
    count = max(1, round(settings["rate"] * settings["window_s"]))
    schedule = poisson(settings["rate"], count, settings["seed"] + number)
    async with open_session(service.key) as session:
        server = OpenAiServer(session, service.url, settings["tokens"], 0.8)
        samples = await open_loop(server, plan(["a0"], count, 32, settings["seed"] + number), schedule)
    if errors := [sample.error for sample in samples if sample.error]:
        raise RuntimeError(f"{len(errors)} of {count} calls failed: {errors[0]}")
    return samples


def stored(service: HttpService) -> dict[str, int]:
    """Returns what may grow: versions that the function lists, the registry's bytes, and resident memory of the
    service."""
    with service.client() as client:
        versions = len(client.get(f"/functions/{NAME}/versions").raise_for_status().json()["versions"])
    registry = service.root / ".garnish" / "registry"
    size = sum(file.stat().st_size for file in registry.rglob("*") if file.is_file())
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in tree(service.pid, processes())]
    return {"versions": versions, "registry_bytes": size, "memory_bytes": sum(pages) * os.sysconf("SC_PAGE_SIZE")}


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    alone = [row for row in rows if row["part"] == "alone"]
    figures = {
        "first_token_s": median(row["first_token_s"] for row in alone),
        "first_token_worst_s": max(row["first_token_s"] for row in alone),
        "deploy_s": median(row["deploy_s"] for row in alone),
    }
    windows = [row for row in rows if row["part"] == "beside"]
    for name in ("ttft_s", "e2e_s"):
        for pushing, title in ((True, "beside"), (False, "without")):
            values = [value for row in windows if row["pushing"] is pushing for value in row[name]]
            figures[f"{name}_p95_{title}"] = float(np.quantile(values, 0.95))
        figures[f"{name}_p95_ratio"] = figures[f"{name}_p95_beside"] / figures[f"{name}_p95_without"]
    figures |= {"pushes": float(sum(row["pushes"] for row in windows)), "late_s": max(row["late_s"] for row in windows)}
    for name in ("versions", "registry_bytes", "memory_bytes"):
        figures |= {f"{name}_first": windows[0][name], f"{name}_last": windows[-1][name]}
        figures |= {f"{name}_most": max(row[name] for row in windows)}
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10, help="of deploys; as many again without")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "rounds": options.rounds, "rank": RANK, "rate": 1.0, "tokens": 16, "window_s": WINDOW_S,
        "seed": options.seed,
    }  # fmt: skip
    if options.quick:
        settings |= {"rounds": 2, "window_s": 2.0}
    settings["windows"] = 2 if options.quick else 2 * round(60 * options.minutes / WINDOW_S)
    probe = ContentionProbe()
    with tempfile.TemporaryDirectory() as root:
        folders = make_adapters(options.model.resolve(), Path(root) / "adapters", [RANK, RANK], options.seed)
        file = (
            f"service: bench\nbase_model: {options.model.resolve()}\ntenants: {{bench: {{}}}}\n"
            f"functions:\n  a0: {{tenant: bench, adapter: {folders[0]}}}\n"
        )
        with HttpService(options.model.resolve(), [], Path(root) / "service", "auto", 0, file=file) as service:
            cores = sorted(os.sched_getaffinity(0))
            pin(service.pid, {cores[-1]}, {cores[0]})
            with service.client(timeout=120.0) as client:
                pushes = Pushes(client, folders[1])
                pushes.push_and_call()
                rows = [pushes.push_and_call() for _ in range(settings["rounds"])]
                rows += measure_windows(service, pushes, settings)
    settings |= probe.values()
    publish(report("push", settings, options.seed, rows, figures_of(rows)), options.json)


if __name__ == "__main__":
    main()
