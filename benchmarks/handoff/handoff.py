"""Handoff to CPU LoRA workers: the empty round trip, the same payload over a socket, and slices against threads.

The engine's side runs on the first core with one thread, the workers on the others, 1, 2, 4 and 8 of them and as many
as there are cores. An empty round trip copies x into shared memory, signals, and waits for the workers' answers, which
compute nothing; a ping-pong does no more than that with one process, over the same memory and its flags; over the
socket x is sent and as many bytes come back. `pinned` computes the q, k, v adapters of one layer on pinned workers;
`threads` computes the same products in this process with as many torch threads as there are workers, on the workers'
cores; `bf16` and `fp32` are these by torch in either dtype, whichever workers choose here. What more workers would take
is predicted (model.py).
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.common.report import ContentionProbe, arguments, publish, report
from benchmarks.handoff.model import engine_us_per_worker, fit, predictions, worst_error
from node_agent.coldstart.product import Product
from node_agent.coldstart.shared import DTYPES, Layout
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.worker import load_flags
from node_agent.coldstart.workers import WorkerPool
from node_agent.cores import spare_cores
from node_agent.types import GROUPS
from tests.support.host_case import HostCase, draw_host, square_widths
from tests.support.worker_counters import counters_of

BASES = {576: square_widths(576, 192, 1536), 4096: square_widths(4096, 1024, 11008)}
TOKENS = (16, 64, 256, 512)
RANK = 64
DTYPE = torch.bfloat16
START_LIMIT_S = 120.0
PING_LIMIT_NS = 60_000_000_000
FEW_PRODUCTS = 20
"""Calls of each dtype: one may take most of a second."""


def percentiles(call: Callable[[], None], calls: int) -> tuple[float, float]:
    """Microseconds, p50 and p99, after a tenth more for warming."""
    times = []
    for _ in range(calls // 10 + calls):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    p50, p99 = np.percentile(times[calls // 10 :], (50, 99)) / 1e3
    return float(p50), float(p99)


def hand_over(pool: WorkerPool, x: torch.Tensor, group: str | None) -> None:
    handoff = pool.open(x, [Segment(0, x.shape[0], -(-x.shape[0] // pool.layout.workers))], 0, group)
    if handoff is None or not handoff.wait():
        raise RuntimeError(f"a handoff failed: {counters_of(pool)}")
    handoff.close()


def ping_pong(pool: WorkerPool, x: torch.Tensor, calls: int, core: int) -> tuple[float, float]:
    """A child on `core`, in place of the first worker, which sleeps, answers flags and does nothing else."""
    memory, flags = pool.memory, load_flags()
    flag_offsets = pool.layout.command_flag(0, 0), pool.layout.done_flag(0, 0)
    rounds = calls // 10 + calls
    command = [sys.executable, "-c", PING_SERVER, *map(str, (pool.fd, pool.layout.size, *flag_offsets, rounds, core))]
    area = memory.x(0, x.shape[0], x.shape[1])
    values = itertools.count(1)
    with subprocess.Popen(command, pass_fds=(pool.fd,), stdout=subprocess.PIPE) as child:

        def call() -> None:
            value = next(values)
            area.copy_(x)
            flags.post(memory.command_flags[0][0], value)
            if not flags.wait(memory.done_flags[0][0], value, PING_LIMIT_NS):
                raise RuntimeError("the ping-pong's child does not answer")

        try:
            assert child.stdout is not None
            child.stdout.readline()
            return percentiles(call, calls)
        finally:
            child.kill()


PING_SERVER = """
import ctypes, mmap, os, sys
from kernels.handoff import CompiledFlags
fd, size, command, done, rounds, core = map(int, sys.argv[1:])
os.sched_setaffinity(0, {core})
memory = mmap.mmap(fd, size)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
flags = CompiledFlags()
print("ready", flush=True)
for value in range(1, rounds + 1):
    while not flags.wait(base + command, value, 10**9):
        pass
    flags.post(base + done, value)
"""


def echo_over_socket(x: torch.Tensor, calls: int, core: int) -> tuple[float, float]:
    """A child on `core` receives x and sends as many bytes back."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    size, received = x.nbytes, bytearray(x.nbytes)
    command = [sys.executable, "-c", ECHO_SERVER, str(there.fileno()), str(size), str(core)]
    child = subprocess.Popen(command, pass_fds=(there.fileno(),))
    there.close()
    payload = x.view(torch.uint8).numpy().reshape(-1)

    def call() -> None:
        here.sendall(payload.data)
        at = 0
        while at < size:
            at += here.recv_into(memoryview(received)[at:])

    try:
        return percentiles(call, calls)
    finally:
        here.close()
        child.wait(START_LIMIT_S)


ECHO_SERVER = """
import os, socket, sys
stream, size = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
os.sched_setaffinity(0, {int(sys.argv[3])})
data = bytearray(size)
while True:
    at = 0
    while at < size:
        n = stream.recv_into(memoryview(data)[at:])
        if not n:
            sys.exit()
        at += n
    stream.sendall(data)
"""


def by_threads(
    case: HostCase, layout: Layout, x: torch.Tensor, calls: int, cores: Sequence[int], dtype: torch.dtype | None = None
) -> tuple[float, float]:
    """The same products with len(cores) torch threads on the cores, in `dtype` or as workers choose here."""
    timings: list[tuple[float, float]] = []

    def work() -> None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        product = Product(case.weights, layout, compiled=False)
        product.multiplied = dtype or product.multiplied
        ys = [torch.zeros(x.shape[0], case.widths[p][1], dtype=DTYPE) for p in GROUPS["qkv"]]
        timings.append(percentiles(lambda: product.compute(ys, x, 0, 0, 0), calls))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return timings[0]


def run(width: int, cores: Sequence[int], tokens: Sequence[int], calls: int, seed: int) -> list[dict[str, Any]]:
    """A row per token count, with len(cores) workers."""
    widths = BASES[width]
    case = draw_host(widths, np.full((1, 1, 7), RANK), DTYPE, seed, scattered=False)
    layout = Layout(2, len(cores), max(tokens), widths, DTYPES.index(DTYPE))
    pool = WorkerPool(case.host, layout, list(cores))
    rows = []
    try:
        pool.start()
        if pool.wait_ready(START_LIMIT_S) < len(cores):
            raise RuntimeError("the workers did not start: see their log")
        for n in tokens:
            x = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(DTYPE)
            row: dict[str, Any] = {"width": width, "workers": len(cores), "tokens": n}
            row["bytes"], row["elements"] = x.nbytes, RANK * sum(sum(widths[p]) for p in GROUPS["qkv"])
            row["pingpong_p50_us"], row["pingpong_p99_us"] = ping_pong(pool, x, calls, cores[0])
            pool.arm()
            row["roundtrip_p50_us"], row["roundtrip_p99_us"] = percentiles(lambda: hand_over(pool, x, None), calls)  # noqa: B023
            few = max(20, calls // 20)
            row["pinned_p50_us"], row["pinned_p99_us"] = percentiles(lambda: hand_over(pool, x, "qkv"), few)  # noqa: B023
            pool.disarm()
            row["socket_p50_us"], row["socket_p99_us"] = echo_over_socket(x, calls // 10, cores[0])
            row["threads_p50_us"], row["threads_p99_us"] = by_threads(case, layout, x, few, cores)
            for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
                timing = by_threads(case, layout, x, FEW_PRODUCTS, cores, dtype)
                row[f"{name}_p50_us"], row[f"{name}_p99_us"] = timing
            rows.append(row)
    finally:
        pool.close()
        case.close()
    return rows


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns round trips by number of workers (16 tokens of 576), and ratios by tokens and width."""
    figures: dict[str, float] = {}
    for row in rows:
        name = f"{row['workers']}_{row['tokens']}x{row['width']}"
        figures.setdefault(f"roundtrip_p50_us_{row['workers']}", row["roundtrip_p50_us"])
        figures[f"over_socket_{name}"] = row["socket_p50_us"] / row["roundtrip_p50_us"]
        figures[f"roundtrip_over_pingpong_{name}"] = row["roundtrip_p50_us"] / row["pingpong_p50_us"]
        figures[f"pinned_over_threads_{name}"] = row["threads_p50_us"] / row["pinned_p50_us"]
        figures[f"bf16_over_fp32_{name}"] = row["bf16_p50_us"] / row["fp32_p50_us"]
    return figures


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    everywhere = os.sched_getaffinity(0)
    spare = spare_cores(engine_threads=1)
    if not spare:
        raise SystemExit("there is one core only, and it is the engine's: nothing to measure")
    os.sched_setaffinity(0, everywhere - set(spare))
    torch.set_num_threads(1)
    tokens, calls = ((16,), 200) if options.quick else (TOKENS, 5000)
    probe = ContentionProbe()
    counts = sorted({1, len(spare)} if options.quick else {1, 2, 4, 8, len(spare)} & set(range(len(spare) + 1)))
    rows = [
        row for width in BASES for count in counts for row in run(width, spare[:count], tokens, calls, options.seed)
    ]
    case = draw_host(BASES[576], np.full((1, 1, 7), RANK), DTYPE, options.seed, scattered=False)
    model = fit(rows, engine_us_per_worker(case, lambda call: percentiles(call, calls)[0]))
    case.close()
    settings = {
        "rank": RANK,
        "dtype": "bf16",
        "calls": calls,
        "spare_cores": len(spare),
        "fitted": msgspec.to_builtins(model),
    }
    figures = {**figures_of(rows), "model_worst_error": worst_error(model, rows)}
    figures |= probe.values()
    publish(report("handoff", settings, options.seed, [*rows, *predictions(model, rows)], figures), options.json)


if __name__ == "__main__":
    main()
