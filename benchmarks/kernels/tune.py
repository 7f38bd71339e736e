"""Finds launch parameters for the GPU that is there, and writes them into kernels/launch_table.json.

Coordinate descent from the default: each parameter in turn is tried at all its values, and the one that is fastest over
all shapes (geometric mean) is kept, until a round changes nothing or the time is up. What computes a wrong result, or
needs more of the GPU than it has, is left out.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace
from triton.runtime.errors import OutOfResources

from benchmarks.common.report import arguments, publish, report
from benchmarks.gpu.check import OPERATIONS, TOLERANCE, WrongResult, error_of, scratch_for
from benchmarks.gpu.timing import gpu_seconds
from kernels.launch import Launch, Tuned, capability_of, default_launch, launch_for, read_table
from tests.support.kernel_cases import Case, draw_case

FILE = Path(__file__).parents[2] / "kernels" / "launch_table.json"
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "decode": {
        "rank_programs": (1, 2, 4, 8), "splits": (1, 2, 4, 8, 16), "ranks": (16, 32, 64),
        "shrink_width": (64, 128, 256), "expand_width": (64, 128, 256), "warps": (1, 2, 4, 8), "stages": (1, 2, 3, 4),
    },
    "prefill": {
        "tokens": (16, 32, 64, 128), "ranks": (16, 32, 64), "shrink_width": (32, 64, 128),
        "expand_width": (64, 128, 256), "splits": (1, 2, 4), "rank_programs": (1, 2), "warps": (2, 4, 8),
        "stages": (2, 3, 4),
    },
}  # fmt: skip
SECONDS = 150.0
MIN_GAIN = 0.01
"""Smallest relative difference that is no noise."""

Measure = Callable[[Callable[[], object]], float]


def tuning_cases(operation: str, device: str) -> list[Case]:
    """bf16, two widths; decode of 1, 8 and 32 requests, prefill of one and of four adapters."""
    mixed = [8, 16, 32, 64, 128, 8, 16, 32]
    batches = [[(i % 8, 1) for i in range(n)] for n in (1, 8, 32)]
    if operation == "sgmv":
        batches = [[(1, 512)], [(i, 128) for i in range(4)]]
    return [
        draw_case(mixed, batch, width, (width, width // 4, width // 4), torch.bfloat16, device=device)
        for width in (2048, 4096)
        for batch in batches
    ]


def time_launch(operation: str, how: Launch, cases: Sequence[Case], measure: Measure) -> list[float] | None:
    """Seconds per case; None when a result is wrong or the GPU can't run it."""
    run, times = OPERATIONS[operation], []
    for case in cases:
        call = partial(run, case.call(xa=scratch_for(case, how)), sizes=how)
        try:
            if not error_of(operation, case, how) <= TOLERANCE[case.x.dtype]:
                return None
            times.append(measure(call))
        except OutOfResources:
            return None
    return times


def tune(
    operation: str, cases: Sequence[Case], choices: dict[str, tuple[int, ...]], measure: Measure, seconds: float
) -> tuple[Launch, float]:
    """The best launch that was found, and its time over the default's (geometric mean). Raises WrongResult."""
    best = default_launch(operation)
    base = time_launch(operation, best, cases, measure)
    if base is None:
        raise WrongResult(f"{operation} is wrong, or does not run, with its default launch {best}")
    best_ratio, before, until = 1.0, None, time.monotonic() + seconds
    while best != before:
        before = best
        for name, values in choices.items():
            for value in values:
                how = replace(best, **{name: value})
                if how == best or time.monotonic() > until:
                    continue
                times = time_launch(operation, how, cases, measure)
                ratio = math.inf if times is None else _geometric_mean(times, base)
                if ratio < best_ratio * (1 - MIN_GAIN):
                    best, best_ratio = how, ratio
    return best, best_ratio


def _geometric_mean(times: Sequence[float], base: Sequence[float]) -> float:
    return math.exp(sum(math.log(t / b) for t, b in zip(times, base, strict=True)) / len(base))


def with_device(text: bytes, device: str, tuned: str, operations: dict[str, Launch], capability: str = "") -> bytes:
    """The table with this device's entry set. Raises ValueError when it would not load."""
    table = read_table(text) | {device: Tuned(tuned, operations, capability)}
    done = msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n"
    read_table(done)
    return done


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each operation")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="the others keep what they have")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU is here: launch parameters are found on the GPU that they are for")
    seconds, launches, ratios = (5.0 if options.quick else options.seconds), {}, {}
    for operation in options.operations.split(","):
        choices = CHOICES["prefill" if operation == "sgmv" else "decode"]
        cases = tuning_cases(operation, "cuda")
        launches[operation], ratios[f"{operation}_over_default"] = tune(operation, cases, choices, gpu_seconds, seconds)
    rows = [{"operation": name, "launch": msgspec.structs.asdict(how)} for name, how in launches.items()]
    document = report("tune_kernels", {"quick": options.quick, "seconds": seconds}, options.seed, rows, ratios)
    publish(document, options.json)
    if not options.quick:
        versions = document["versions"]
        tuned = f"commit {document['commit']}, triton {versions['triton']}, torch {versions['torch']}"
        launches_by_name = {name: launch_for(name, torch.device("cuda")) for name in OPERATIONS} | launches
        device = torch.device("cuda")
        name, capability = torch.cuda.get_device_name(device), capability_of(device)
        FILE.write_bytes(with_device(FILE.read_bytes(), name, tuned, launches_by_name, capability))


if __name__ == "__main__":
    main()
