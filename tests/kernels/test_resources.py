"""Every Triton kernel compiles for real GPUs, without one, and none is compiled while a node serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVING = {
    *("add_rms_norm", "silu_mul", "rotate_and_store", "decode_attention", "combine_splits", "prefill_attention"),
    *("decode_shrink", "decode_expand", "sgmv_shrink", "sgmv_expand"),
}


@pytest.fixture
def compiled(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """A folder that keeps what was compiled from one run to the next: Triton compiles anew whatever has changed of a
    kernel, its arguments or the compiler. Without pytest's cache it is empty."""
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    return tmp_path if cache is None else cache.mkdir("triton")


def compiling(cache: Path, *command: str) -> str:
    """Output of a process of its own: where there is no GPU, this one's Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compile_matrix(compiled: Path) -> None:
    lines = compiling(compiled, "-m", "benchmarks.kernels.resources").splitlines()
    kernels = [json.loads(line) for line in lines]
    found = {(kernel["sm"], kernel["kernel"].rpartition(": ")[2].partition(",")[0]) for kernel in kernels}
    assert found == {(sm, kernel) for sm in (80, 90, 100) for kernel in SERVING}
    for kernel in kernels:
        assert kernel["shared_bytes"] <= 100 << 10, kernel
        assert kernel["spills"] <= 0, kernel


def test_nothing_is_compiled_while_serving(tmp_path: Path) -> None:
    found = json.loads(compiling(tmp_path, "-m", "tests.kernels.compilations", "7"))
    assert set(found["known"]) == SERVING
    assert found["while serving"] == []
    assert found["a stride that was not there"] == ["add_rms_norm"]
    base = {"1 rows": 10, "256 rows": 9}  # one more where contexts are split
    groups = {"none": 0, "q,k,v": 1, "all seven": 4}
    assert found["launches of a layer"] == {
        f"{rows}, {adapted}": launches + 2 * count
        for rows, launches in base.items()
        for adapted, count in groups.items()
    }
