"""A decode step of a 7B model on a GPU, counted without one (tests/support/decode_step.py), and the compile matrix."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec

from benchmarks.common.report import ROOT, arguments, publish, report
from tests.support.decode_step import ADAPTED, CONTEXT, RANK, SHAPES, step_row

ROWS = (1, 8, 32, 256)


def compiled_rows() -> list[dict[str, Any]]:
    """The compile matrix, bf16."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels.resources"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    return [{"resources": msgspec.json.decode(line)} for line in done.stdout.splitlines()]


def study(quick: bool, seed: int) -> dict[str, Any]:
    steps = [
        step_row(shape, rows, adapted)
        for shape in SHAPES[: 1 if quick else None]
        for rows in ROWS[: 2 if quick else None]
        for adapted in ADAPTED
    ]
    figures = {
        f"{row['model']}, {row['rows']} rows, adapted: {row['adapted']}: launches of a layer": row["layer_launches"]
        for row in steps
    }
    rows = [{"step": row} for row in steps] + ([] if quick else compiled_rows())
    return report("kernel_steps", {"context": CONTEXT, "rank": RANK, "dtype": "bf16"}, seed, rows, figures)


def main() -> None:
    if "TRITON_INTERPRET" in os.environ:
        sys.exit("unset TRITON_INTERPRET: what the interpreter runs is not compiled, so nothing would be counted")
    options = arguments(__doc__ or "").parse_args()
    publish(study(options.quick, options.seed), options.json)


if __name__ == "__main__":
    main()
