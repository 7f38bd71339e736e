"""Every level of instructions up to this processor's: the operators are compiled for it and compute the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.level import LEVELS, SWITCH, host_level, levels_up_to, used_level
from tests.support.draws import WANTED
from tests.support.levels import level_environment

ROOT = Path(__file__).parents[2]
LANES = {"avx2": 8, "avx512": 16, "avx512_bf16": 16, "amx": 16}
CHOSEN = (
    "tests/kernels/test_product.py", "tests/kernels/test_compiled.py::test_drawn",
    "tests/kernels/test_decoder.py", "tests/node_agent/test_linear.py",
    "tests/node_agent/coldstart/test_worker_products.py::test_both_ways_of_computing",
    "tests/node_agent/coldstart/test_worker_products.py::test_drawn[(torch.bfloat16, True)]",
)  # fmt: skip
"""Workers of one dtype are enough: what they compute with is the second to last one's."""


def at_level(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | level_environment(level) | {WANTED: "few"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if request.param not in levels_up_to(host_level()):
        pytest.skip(f"this processor has {host_level()} at most, not {request.param}")
    return str(request.param)


def test_operators_are_compiled_for_the_level(level: str) -> None:
    done = at_level(level, "-c", "from kernels.build import load_library as l; print(l().vector_lanes())")
    assert done.stdout.strip() == str(LANES[level]), done.stderr


def test_operators_are_exact_at_every_lower_level(level: str) -> None:
    if level == host_level():
        pytest.skip(f"{level} is this processor's own level: these tests run at it anyway")
    done = at_level(level, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *CHOSEN)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_switch_names_a_level_that_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "avx1024")
    with pytest.raises(
        ValueError, match=r"GARNISH_CPU_LEVEL=avx1024: unknown; use one of avx2, avx512, avx512_bf16, amx"
    ):
        used_level()
    monkeypatch.setenv(SWITCH, "")
    assert used_level() == host_level()
    if host_level() != LEVELS[-1]:
        monkeypatch.setenv(SWITCH, LEVELS[-1])
        with pytest.raises(ValueError, match=f"this processor has {host_level()} at most"):
            used_level()
