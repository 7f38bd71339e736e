"""What vLLM's real stat loggers give to a node, without an engine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from cluster.news import VllmLoad
from tests.vllm.stat_loggers import STEPS
from tests.vllm.vllm_process import ROOT, SETTINGS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_the_last_step_and_all_preemptions_are_reported(python: Path, base: Path, tmp_path: Path) -> None:
    """vLLM's own logger keeps a gauge for each set of adapters that ever ran."""
    subprocess.run(
        [python, "-m", "tests.vllm.stat_loggers", base, tmp_path / "out"],
        check=True,
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    load, _, metrics = (tmp_path / "out").read_text().partition("\n")
    assert msgspec.json.decode(load, type=VllmLoad) == VllmLoad(STEPS - 1, 3, 0.5, 2 * STEPS)
    lines = metrics.splitlines()
    of_adapters = [line for line in lines if line.startswith("vllm:lora_requests_info{")]
    assert len(of_adapters) == 1 and f"adapter-{STEPS - 1}" in of_adapters[0]
    (running,) = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    assert float(running.split()[-1]) == STEPS - 1
