"""What `garnish profile` prints of what it has measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.performance_fit import PaperForm
from garnish.cli.profile import show
from garnish.screen import Screen
from node_agent.coldstart.profile import CpuLora, LinkCost, Profile, ProfileKey
from tests.cluster.measured import PROFILE

COLD = Profile(ProfileKey("f", "bfloat16", "cpu", 1, 1), ((16, 1e-3),), CpuLora(1e-5, 0.0, 1e-9), LinkCost(1e-4, 2e9))


@pytest.mark.parametrize("paper", [(), (PaperForm("bgmv", 1e-6, 0.02, 0.9611, 32),)])
def test_costs_and_their_quality_are_printed(capsys: pytest.CaptureFixture[str], paper: tuple[PaperForm, ...]) -> None:
    performance = msgspec.to_builtins(msgspec.structs.replace(PROFILE, paper=paper))
    show({"cold_start": msgspec.to_builtins(COLD), "performance": performance}, Path("state/node-1.json"), Screen())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a layer on the device, by prompt tokens: 16: 1.00 ms"
    quality = " (R^2 0.990, held-out error 2.0%, 2 configurations, 0 set aside)"
    step = "30.00 ms + 100.0 us a row + 10.0 ns a token of context + 1.00 us of the ranks of adapters"
    assert f"a decode step: {step}{quality}" in lines
    prompts = "10.00 ms + 500.0 us a token + 0.00 ns a token squared + 100.0 ns a token and rank"
    assert f"a pass over prompts: {prompts}{quality}" in lines
    forms = [line for line in lines if line.startswith("a decode step by the rank term alone")]
    assert forms == (["a decode step by the rank term alone, batches of 4 to 32: R^2 0.961 (bgmv)"] if paper else [])
    assert lines[-1] == "written to state/node-1.json and node-1.performance.json"
