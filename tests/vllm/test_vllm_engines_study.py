"""The study of both engines, in its quick form, with the real vLLM and its own server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def test_all_servers_answer_all_calls(python: Path, tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    command = [sys.executable, "-m", "benchmarks.engines.engines", "--quick", "--python", str(python)]
    done = subprocess.run([*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(file.read_text())
    servers = ("garnish", "vllm", "vllm_server")
    for load in ("start", "again", "base", "adapters", "first"):
        assert {row["server"] for row in document["rows"] if row["load"] == load} == set(servers), load
    states = {row["server"]: set(row["by_state"]) for row in document["rows"] if row["load"] == "first"}
    assert states == {"garnish": {"absent"}, "vllm": {"absent"}, "vllm_server": set()}
    tokens = {row["server"]: row["prompt_tokens"] for row in document["rows"] if row["load"] == "adapters"}
    assert len(set(tokens.values())) == 1, "all have the same prompts"
    assert {"ratio_base_1", "ratio_adapters_2", "added_ttft_ms_adapters_1"} <= set(document["figures"])
