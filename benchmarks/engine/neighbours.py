"""Time between tokens next to one busy process per core, over the same service alone.

The service as a user starts it, one stream of the base at a time. Each round measures it alone and next to the busy
processes, with the node's own limit of spinning and with OpenMP's default (two services, by turns). A figure is the
mean time per token of a stream; `busy_over_alone` compares the two with the limit, `alone_over_default` is what the
limit costs where nobody else computes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.http_service import HttpService
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, report, run_study
from benchmarks.common.rule import ratio_figures
from node_agent.cores import SPIN_LIMIT, usable_cores

DEFAULT_SPIN = {"GOMP_SPINCOUNT": "300000"}
"""OpenMP's own, where threads are not more than cores."""
BUSY = "while True: pass"


@contextlib.contextmanager
def busy_processes() -> Iterator[None]:
    """Runs a busy process on each core that this process may use."""
    cores = sorted(os.sched_getaffinity(0))[: usable_cores()]
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\n" + BUSY
    processes = [subprocess.Popen([sys.executable, "-c", code, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def service_with(environment: dict[str, str], model: Path, root: Path, dtype: str) -> HttpService:
    """A service whose node's threads wait as `environment` says; to be entered while it is set."""
    os.environ.update(environment)
    return HttpService(model, [], root, dtype, usable_cores())


def study(options: Any, root: Path) -> dict[str, Any]:
    rounds, tokens = (1, 6) if options.quick else (options.rounds, 48)
    probe = ContentionProbe()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        services = {
            name: stack.enter_context(service_with(environment, options.model, root / name, options.dtype))
            for name, environment in (("default", DEFAULT_SPIN), ("limited", SPIN_LIMIT))
        }
        for service in services.values():
            service.run((None,), 16, 4)
        for index in range(rounds):
            row: dict[str, Any] = {"round": index}
            for name, service in services.items():
                row[f"{name}_alone_ms"] = gap_ms(service, tokens)
            with busy_processes():
                time.sleep(0.5)  # until they run
                for name, service in services.items():
                    row[f"{name}_busy_ms"] = gap_ms(service, max(4, tokens // 4))
            rows.append(row)
    settings = {"model": options.model.name, "dtype": options.dtype, "rounds": rounds, "tokens": tokens,
                "spin": SPIN_LIMIT["GOMP_SPINCOUNT"], "default_spin": DEFAULT_SPIN["GOMP_SPINCOUNT"],
                "quick": options.quick}  # fmt: skip
    return report("neighbours", settings, options.seed, rows, figures_of(rows) | probe.values())


def gap_ms(service: HttpService, tokens: int) -> float:
    """The mean time per token of one stream, after one token of prompt."""
    _, rate = service.run((None,), 1, tokens)
    return round(1e3 / rate, 3)


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns medians over the rounds' own ratios, the worst rounds, and the times' medians."""
    figures = {name: median(row[name] for row in rows) for name in rows[0] if name != "round"}
    for name, over, under in (
        ("busy_over_alone", "limited_busy_ms", "limited_alone_ms"),
        ("default_busy_over_alone", "default_busy_ms", "default_alone_ms"),
        ("alone_over_default", "limited_alone_ms", "default_alone_ms"),
    ):
        columns = ([row[column] for row in rows] for column in (over, under))
        figures |= ratio_figures(name, *columns, lower_is_better=True)
    return figures


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    run_study(study, options)


if __name__ == "__main__":
    main()
