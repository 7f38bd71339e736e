"""Both engines and vLLM's own server, in turn: the same base, adapters and calls, in alternated rounds of one run.

All servers run at once, but only one of them is awake: the others are stopped (SIGSTOP) while it is called. On a CPU
the processes that compute (our engine; vLLM's engine core and worker) have one core, with one thread; the gateway,
the node's or vLLM's HTTP process and the client have another. Starts are timed before that, with nothing pinned.

`--shape 7b --callers 32 128` measures a 7B with drawn weights on a GPU; `--python` names the interpreter that has vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.adapters import make_adapters
from benchmarks.common.http_service import HttpService
from benchmarks.common.invoke import until_measured
from benchmarks.common.processes import tree_usage
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, publish, report, save
from benchmarks.engines.figures import figures_of
from benchmarks.engines.pinning import on_cores, pin, resume, stop
from benchmarks.engines.servers import GARNISH, TITLES, Server, Setup
from benchmarks.engines.turns import Loads, call_each, loads_of_round, measure
from benchmarks.gpu.service import write_model
from tests.support.environments import VLLM_PYTHON
from tests.support.random_model import SHAPES, write_adapters

RANKS = (8, 16, 32, 64)
MAX_RANK = max(RANKS)
MEASURED_S = 120.0
"""Maximum seconds for our engine to measure its own costs, which it does while it is idle."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Variables of pinned servers: with more threads than cores, threads would wait for each other."""


@dataclass(frozen=True)
class Cores:
    computing: set[int]
    serving: set[int]
    """cores of all other processes, and of the client"""


class Study:
    def __init__(self, setup: Setup, loads: Loads, adapters: list[Path], root: Path, cores: Cores | None) -> None:
        """`cores`: None pins nothing."""
        self._setup, self._loads, self._adapters, self._root, self._cores = setup, loads, adapters, root, cores

    def starts(self, names: list[str], count: int) -> Iterator[dict[str, Any]]:
        """Yields a row for each start. Every server starts with its warm adapters."""
        for number in range(count):
            for name in _in_turn(names, number):
                before = _device_bytes()
                begin = time.monotonic()
                root = self._root / f"start-{name}-{number}"
                with self._setup.make(name, self._adapters[: self._loads.warm], root, {}) as server:
                    seconds = time.monotonic() - begin
                    asyncio.run(call_each(server, self._loads))
                    row = {"start_s": seconds, "memory_bytes": tree_usage(server.pid)[1]}
                    if before is not None:
                        row["device_bytes"] = (_device_bytes() or 0) - before
                yield {"round": number, "server": name, "load": "start", **row}

    def rounds(self, names: list[str], count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yields a row for each load of each round and server. Servers take turns within a load, so that each pair of
        figures is of the same minute; another server is first in each."""
        with ExitStack() as stack, on_cores(self._cores.serving if self._cores else None):
            servers: dict[str, Server] = {}
            for name in names:
                servers[name] = self._started(name, stack)
            for number in range(count):
                for at, load in enumerate(loads_of_round(self._loads, number)):
                    for name in _in_turn(names, number + at):
                        resume(servers[name].pid)
                        drawn = (seed << 16) + 16 * number + at
                        row = asyncio.run(measure(servers[name], load, self._loads.prompt_words, drawn))
                        stop(servers[name].pid)
                        yield {"round": number, "server": name, **row}

    def _started(self, name: str, stack: ExitStack) -> Server:
        """Starts a server, and stops its processes until its first turn."""
        cores = self._cores
        # Our engine takes as many threads as it has cores at its start.
        start_on = None if cores is None else cores.computing | (set() if name == GARNISH else cores.serving)
        environment: Mapping[str, str] = {} if cores is None else ONE_THREAD
        with on_cores(start_on):
            server = stack.enter_context(
                self._setup.make(name, self._adapters, self._root / f"rounds-{name}", environment)
            )
        stack.callback(resume, server.pid)
        if isinstance(server, HttpService):
            with suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(until_measured(server), MEASURED_S))
        if cores is not None and not pin(server.pid, cores.computing, cores.serving):
            raise RuntimeError(f"{name}: no process that computes was found")
        asyncio.run(call_each(server, self._loads))
        stop(server.pid)
        return server


def _in_turn(names: list[str], number: int) -> list[str]:
    """Returns the names in this round's order: each begins as often as the others."""
    at = number % len(names)
    return names[at:] + names[:at]


def _device_bytes() -> int | None:
    """Returns the bytes in use on the GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def vllm_versions(python: Path) -> dict[str, str]:
    """Returns the versions of vLLM and of its torch. Raises CalledProcessError, OSError."""
    code = "import json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in ('vllm', 'torch')}))"
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, timeout=120)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def loads_of(options: argparse.Namespace, *, gpu: bool) -> Loads:
    if options.quick:
        return Loads(warm=2, first=1, calls=2, callers=(2,), per_caller=1, prompt_words=4, tokens=4)
    callers = tuple(options.callers or ((32, 128) if gpu else (8,)))
    if gpu:
        return Loads(warm=16, first=2, calls=16, callers=callers, per_caller=4, prompt_words=128, tokens=64)
    return Loads(warm=8, first=1, calls=4, callers=callers, per_caller=1, prompt_words=16, tokens=16)


def setup_of(options: argparse.Namespace, model: Path, loads: Loads, *, gpu: bool) -> Setup:
    """vLLM has as many slots as there are warm adapters, so that a new one always takes a slot from one of them."""
    stated: dict[str, Any] = {"max_loras": loads.warm, "max_lora_rank": MAX_RANK}
    if gpu:  # three servers share the device
        stated |= {"gpu_memory_utilization": 0.3}
    return Setup(
        model=model,
        python=options.python,
        device="cuda" if gpu else "cpu",
        dtype="bfloat16",
        max_rows=max(32, *loads.callers),
        kv_memory=(8 if gpu else 1) << 30,
        adapter_memory=4 << 30 if gpu else 256 << 20,
        arguments=stated,
    )


def study(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Every row is in the file as soon as it is there."""
    gpu = bool(options.shape)
    rounds, starts = (1, 1) if options.quick else (options.rounds, options.starts)
    loads = loads_of(options, gpu=gpu)
    count = loads.adapters(rounds)
    if gpu:
        model = write_model(root / options.shape, options.shape, options.model, torch.device("cuda"), options.seed)
        torch.cuda.empty_cache()
        adapters = write_adapters(root / "adapters", options.shape, MAX_RANK, count, options.seed)
    else:
        model = options.model
        ranks = [RANKS[at % len(RANKS)] for at in range(count)]
        adapters = make_adapters(model, root / "adapters", ranks, options.seed, dtype=torch.bfloat16)
    setup = setup_of(options, model, loads, gpu=gpu)
    cores = cores_of(gpu=gpu)
    settings = {
        **asdict(loads), "model": options.shape or model.name, "servers": options.servers, "rounds": rounds,
        "starts": starts, "ranks": [MAX_RANK] if gpu else RANKS, "targets": "q,k,v", "pinned": cores is not None,
        "vllm": vllm_versions(options.python), "arguments": dict(setup.arguments), "dtype": setup.dtype,
        "max_rows": setup.max_rows, "kv_memory": setup.kv_memory, "quick": options.quick,
    }  # fmt: skip
    probe, measured = ContentionProbe(), Study(setup, loads, adapters, root, cores)
    rows: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        return report("engines", settings | probe.values(), options.seed, rows, figures_of(rows, options.seed))

    for part in (
        measured.starts(options.servers, starts),
        measured.rounds(options.servers, rounds, options.seed),
    ):
        for row in part:
            rows.append(row)
            print({name: row[name] for name in row if name not in ("ttft_ms", "by_state")}, file=sys.stderr, flush=True)
            save(document(), options.json)
    return document()


def cores_of(*, gpu: bool) -> Cores | None:
    """Returns the cores of a study on the CPU; None on a GPU, and where there is only one core."""
    usable = sorted(os.sched_getaffinity(0))
    return None if gpu or len(usable) < 2 else Cores({usable[-1]}, {usable[0]})


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", type=Path, default=VLLM_PYTHON, metavar="FILE", help="has vLLM")
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], default="")
    parser.add_argument("--callers", type=int, nargs="+", metavar="N")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--servers", nargs="+", choices=list(TITLES), default=list(TITLES))
    options = parser.parse_args()
    if options.shape and not torch.cuda.is_available():
        parser.error(f"--shape {options.shape} needs a GPU, and none is here; without it the demo base runs on the CPU")
    if not options.python.exists():
        parser.error(f"--python {options.python}: there is no interpreter with vLLM; make one by `make .engines/vllm`")
    with tempfile.TemporaryDirectory() as root:
        publish(study(options, Path(root)), options.json)


if __name__ == "__main__":
    main()
