"""Cost of many nodes in the gateway: 60 nodes of 2,000 resident adapters each, and 100 calls per second.

Two gateway workers share a Redis; the registry is on an S3 server; calls go to 300 functions. The nodes are stubs
(control_plane_nodes.py) that publish records by the nodes' own code; moto's server stands for S3. All of them share the
host's cores. The same load goes to an earlier version (`--before`, a commit), whose gateway and nodes are taken from
there.

`redis_in_mb_s`: what Redis receives during the calls. `record_cpu_share`: of a worker's time, without calls.
`placement_cpu_p99_ms`: CPU time of one placement, in one process, without the trip to Redis. `wall_p99_ratio`: a call's
p99 while nodes publish and adapters move, over the same with one record a second and none moving, in turn.
`store_reads_s`: GET and HEAD requests that reach the S3 server, once the registry is two minutes old and each worker
knows each function. It reads each that is in use again every five minutes, 2 a second in all, which comes after the
rounds. Worst cases are the worker and the round that had most.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx

from adapters.base_model import load_base_model
from adapters.epoch import DIRTY_SECONDS
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.tenants import Tenants
from benchmarks.common.gateway_process import gateway_process
from benchmarks.common.processes import child_pids, cpu_seconds, process
from benchmarks.common.report import ROOT, SMOLLM2, ContentionProbe, arguments, example_adapter, publish, report
from benchmarks.common.s3 import s3_server
from tests.support.many_functions import TENANT, fill
from tests.support.redis_server import RedisServer, redis_server

BEFORE = "ae654f4"
TRACE = ROOT / "benchmarks" / "data" / "azure_functions_2019_480min.csv.gz"
WORKERS = 2
WARM_ROUNDS = 3
"""Rounds after which each worker knows almost all functions; after one it knows four of five."""
PACE, REST = {"moving": True, "interval": 0.2}, {"moving": False, "interval": 1.0}


@dataclass
class Plane:
    """The gateway and the nodes of one release, and what they share."""

    gateway: str
    control: str
    key: str
    pids: list[int]
    redis: RedisServer
    s3_log: Path

    def pace(self, pace: dict[str, Any]) -> None:
        httpx.post(self.control + "/pace", json=pace, timeout=60).raise_for_status()

    def redis_in(self) -> float:
        with self.redis.client as client:
            return float(client.info("stats")["total_net_input_bytes"])

    def reads(self) -> int:
        return sum(line in ("GET", "HEAD") for line in self.s3_log.read_text().split())

    def cpu(self) -> list[float]:
        """Seconds of each worker."""
        return [cpu_seconds(pid) for pid in self.pids]


@contextmanager
def plane(tree: Path, model: Path, root: Path, settings: dict[str, Any]) -> Iterator[Plane]:
    root.mkdir()
    base, log = load_base_model(model, model.name), root / "s3.log"
    with ExitStack() as stack:
        registry = stack.enter_context(s3_server(log=log))
        redis = stack.enter_context(redis_server(root))
        store = open_store(registry)
        tenants = Tenants(store)
        tenants.put(TENANT)
        key = tenants.add_key(TENANT)[0]
        fill(Registry(store, base), example_adapter(model), settings["functions"], 0)
        gateway = stack.enter_context(
            gateway_process(model, registry, root, tree=tree, workers=WORKERS, redis=redis.url)
        )
        command, nodes_config = _nodes(settings, gateway.url, gateway.secret, root, base, model)
        nodes = stack.enter_context(process(command, nodes_config, root / "nodes.log", tree))
        assert nodes.stdout is not None
        control = nodes.stdout.readline().decode().strip()
        gateway.wait_until_ready()
        workers = [pid for pid in child_pids(gateway.process.pid) if _is_worker(pid)]
        yield Plane(gateway.url, control, key, workers, redis, log)


def _is_worker(pid: int) -> bool:
    return "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()


def _nodes(
    settings: dict[str, Any], url: str, secret: str, root: Path, base: Any, model: Path, placements: int = 0
) -> tuple[list[str], bytes]:
    nodes_config = {
        "gateway": url, "secret": secret, "secret_file": str(root / "secret"), "base": base.fingerprint,
        "base_id": base.id, "model_dir": str(model), "trace": str(TRACE), "nodes": settings["nodes"],
        "residents": settings["residents"], "calls_s": settings["calls_s"], "placements": placements,
    }  # fmt: skip
    return ["-P", str(ROOT / "benchmarks" / "gateway" / "control_plane_nodes.py")], json.dumps(
        nodes_config
    ).encode() + b"\n"


async def calls(target: Plane, settings: dict[str, Any]) -> dict[str, float]:
    """An open loop: each call begins at its time, however long others take."""
    times, errors = list[float](), 0
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"authorization": f"Bearer {target.key}"}
    body = {"prompt": "hello", "max_tokens": 1}
    count, begin = int(settings["calls_s"] * settings["seconds"]), time.monotonic()

    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def call(number: int) -> None:
            nonlocal errors
            await asyncio.sleep(max(0.0, begin + number / settings["calls_s"] - time.monotonic()))
            sent, name = time.monotonic(), f"f{number * 7 % settings['functions']:05d}"
            try:
                async with session.post(f"{target.gateway}/invoke/{name}", json=body) as reply:
                    await reply.read()
                    errors += reply.status != 200
            except aiohttp.ClientError:
                errors += 1
            times.append(time.monotonic() - sent)

        await asyncio.wait_for(asyncio.gather(*(call(number) for number in range(count))), 120)
    span = time.monotonic() - begin
    times.sort()
    return {
        "errors": errors, "calls_s": count / span, "p50_ms": 1e3 * times[count // 2],
        "p99_ms": 1e3 * times[int(count * 0.99)], "most_ms": 1e3 * times[-1],
    }  # fmt: skip


def measure(tree: Path, which: str, model: Path, root: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with plane(tree, model, root, settings) as target:
        time.sleep(settings["settle"])  # of a registry that is new no name is believed for long yet
        for _ in range(WARM_ROUNDS):  # every function is known then to each worker, and every connection made
            asyncio.run(calls(target, settings))
        for number in range(settings["rounds"]):
            for what, pace in (("moving", PACE), ("rest", REST)):
                target.pace(pace)
                time.sleep(2.0)
                received, reads, begin = target.redis_in(), target.reads(), time.monotonic()
                row = asyncio.run(calls(target, settings))
                span = time.monotonic() - begin
                rows.append({
                    "tree": which, "round": number, "what": what, **row,
                    "redis_in_mb_s": (target.redis_in() - received) / span / 1e6,
                    "store_reads_s": (target.reads() - reads) / span,
                })  # fmt: skip
            target.pace(PACE)
            time.sleep(2.0)
            received, cpu, begin = target.redis_in(), target.cpu(), time.monotonic()
            time.sleep(settings["seconds"])
            span = time.monotonic() - begin
            shares = [(after - before) / span for before, after in zip(cpu, target.cpu(), strict=True)]
            rows.append({
                "tree": which, "round": number, "what": "records",
                "redis_in_mb_s": (target.redis_in() - received) / span / 1e6,
                "cpu_share_mean": sum(shares) / len(shares), "cpu_share_most": max(shares),
            })  # fmt: skip
    base = load_base_model(model, model.name)
    placements = _nodes(settings, "http://127.0.0.1:1", "x" * 43, root, base, model, settings["placements"])
    with process(*placements, root / "placements.log", tree) as placing:
        assert placing.stdout is not None
        line = placing.stdout.readline()
        if not line:
            raise RuntimeError((root / "placements.log").read_text()[-2000:])
        rows.append({"tree": which, "what": "placements", **json.loads(line)})
    return rows


def figures_of(rows: list[dict[str, Any]], which: str, suffix: str) -> dict[str, float]:
    def column(what: str, name: str) -> list[float]:
        return [row[name] for row in rows if row["tree"] == which and row["what"] == what]

    ratios = [a / b for a, b in zip(column("moving", "p99_ms"), column("rest", "p99_ms"), strict=True)]
    figures = {
        "redis_in_mb_s": median(column("moving", "redis_in_mb_s")),
        "redis_in_mb_s_most": max(column("moving", "redis_in_mb_s")),
        "record_cpu_share": median(column("records", "cpu_share_mean")),
        "record_cpu_share_most": max(column("records", "cpu_share_most")),
        "placement_cpu_p99_ms": column("placements", "p99_ms")[0],
        "placement_cpu_most_ms": column("placements", "most_ms")[0],
        "wall_p99_ratio": median(ratios),
        "wall_p99_ratio_most": max(ratios),
        "wall_p99_ms": median(column("moving", "p99_ms")),
        "store_reads_s": median(column("moving", "store_reads_s")),
        "store_reads_s_most": max(column("moving", "store_reads_s")),
        "errors": sum(column("moving", "errors")) + sum(column("rest", "errors")),
    }
    return {name + suffix: value for name, value in figures.items()}


@contextmanager
def trees(before: str) -> Iterator[dict[str, Path]]:
    """The earlier version as a folder, and this one."""
    with tempfile.TemporaryDirectory() as root:
        folders = {"after": ROOT}
        if before:
            packed = subprocess.run(["git", "archive", before], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
            with tarfile.open(fileobj=BytesIO(packed)) as archive:
                archive.extractall(root, filter="data")
            folders = {"before": Path(root), "after": ROOT}
        yield folders


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--before", default=BEFORE, help="commit of the earlier version; empty: none")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "nodes": 60, "residents": 2000, "functions": 300, "calls_s": 100.0, "seconds": 10.0, "rounds": options.rounds,
        "settle": DIRTY_SECONDS + 5, "placements": 2000, "workers": WORKERS, "before": options.before,
    }  # fmt: skip
    if options.quick:
        settings |= {"nodes": 4, "residents": 50, "functions": 10, "calls_s": 10.0, "seconds": 1.0, "rounds": 1}
        settings |= {"placements": 50, "settle": 0, "before": ""}
    probe, begin, rows = ContentionProbe(), time.monotonic(), list[dict[str, Any]]()
    with trees(settings["before"]) as folders, tempfile.TemporaryDirectory() as root:
        for which, tree in folders.items():
            rows += measure(tree, which, options.model.resolve(), Path(root) / which, settings)
    settings |= {**probe.values(), "took_s": round(time.monotonic() - begin)}
    figures = figures_of(rows, "after", "")
    if settings["before"]:
        figures |= figures_of(rows, "before", "_before")
    publish(report("control_plane", settings, options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
