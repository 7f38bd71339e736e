"""The training script as the quickstart uses it: one adapter of a few steps, in a directory of its own."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
REPORT = EXAMPLES / "adapters" / "results.json"


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "adapters" / "train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


WITHOUT_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Makes torch compute as on a CPU of AVX2 alone."""


def pace(expression: str, **environment: str) -> str:
    """What an expression over examples/adapters/pace.py prints, in a process of its own."""
    command = [sys.executable, "-c", f"from pace import *; print({expression})"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        command, cwd=EXAMPLES / "adapters", env=settings, capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the level of instructions can't be forced here")
def test_without_bf16_units_training_is_in_fp32() -> None:
    """There torch's bf16 products take a reference path, several times as slow."""
    assert pace("fast_dtype(576, 1536)", **WITHOUT_BF16) == "torch.float32"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/adapters/pace.py in this process."""
    monkeypatch.syspath_prepend(EXAMPLES / "adapters")
    return importlib.import_module("pace")


def test_a_tie_is_for_fp32(here: ModuleType) -> None:
    clock = iter(range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here.time, "perf_counter", lambda: next(clock))
        taken = here.fast_dtype(8, 8)
    assert str(taken) == "torch.float32"


def test_bf16_is_taken_where_it_is_faster(here: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_product_s", lambda d_in, d_out, dtype: dtype.itemsize / 1000)
    assert str(here.fast_dtype(8, 8)) == "torch.bfloat16"


def test_time_left(here: ModuleType) -> None:
    assert [here.time_left(*given) for given in ((1, 10, 2.0), (5, 10, 60.0), (2, 100, 60.0))] == [
        "about 18 s left", "about 60 s left", "about 49 min left"
    ]  # fmt: skip


@pytest.mark.slow
def test_one_adapter_elsewhere(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "models" / "convert_stories.py")], check=True, timeout=240)
    committed, report = EXAMPLES / "adapters" / "stories260K" / "dragon", REPORT.read_bytes()
    before = (committed / "adapter_model.safetensors").read_bytes()
    done = train("dragon", "--base", "stories260K", "--steps", "2", "--out", str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^stories260K/dragon: 2 steps in (float32|bfloat16)$", done.stdout, re.MULTILINE)
    assert re.search(r"^step 1 of 2: loss \d+\.\d+, about \d+ s left$", done.stdout, re.MULTILINE)
    assert (tmp_path / "mine" / "adapter_config.json").read_bytes() == (committed / "adapter_config.json").read_bytes()
    assert len((tmp_path / "mine" / "adapter_model.safetensors").read_bytes()) == len(before)
    assert (tmp_path / "mine" / "adapter_model.safetensors").read_bytes() != before
    assert (committed / "adapter_model.safetensors").read_bytes() == before
    assert REPORT.read_bytes() == report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("pirate", "--out", "x"), "--out takes one adapter, not 2"),
        (("dragon", "--steps", "2"), "needs --out"),
        (("dragon", "--steps", "0", "--out", "x"), "at least 1"),
    ],
)
def test_refused(arguments: tuple[str, ...], problem: str) -> None:
    done = train(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
