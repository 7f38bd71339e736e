"""docs/guide/quickstart.md with `engine: vllm`: its commands as they are printed, and PEFT's tokens in fp32."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.quickstart_page import (
    CALL,
    COMPARE,
    DEPLOY,
    ROOT,
    TRAIN,
    blocks,
    key_command,
    lay_out_clone,
    lines_same_everywhere,
    python_scripts,
    script,
)
from tests.vllm.served import Served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
SECONDS = 900
NODE = """node:
  engine: vllm
  dtype: float32
  vllm: {{python: {python}, max_loras: 4, max_lora_rank: 64, max_model_len: 1024, max_num_seqs: 8, enforce_eager: true}}
"""
SECTION = re.compile(r"^node:\n(?:  .*\n)+", re.MULTILINE)
"""The demo's settings of nodes"""
COLD = re.compile(r"^cold start: (?:absent|host) \(wait\), load ", re.MULTILINE)
EQUAL = re.compile(r"pirate:1 and PEFT alone \(float32 on cpu\) write the same: (\d+) of (\d+) tokens equal")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm_dir: Path, python: Path) -> Iterator[Served]:
    """The demo's service in a folder that looks like a clone, with vLLM."""
    folder = tmp_path_factory.mktemp("clone")
    lay_out_clone(folder)
    text, found = SECTION.subn(NODE.format(python=python), (ROOT / "serverless.yml").read_text())
    assert found == 1
    served = Served(folder, text)
    with served.up():
        yield served


def pasted(served: Served, *command: str) -> tuple[str, str]:
    """Returns what a command prints to both outputs."""
    done = subprocess.run(
        command, cwd=served.folder, env=served.environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{served.logs()}"
    return done.stdout, done.stderr


def shell(served: Served, heading: str, before: str = "") -> tuple[str, str]:
    """Runs the commands below a heading, after `before`, and returns what they print to both outputs."""
    return pasted(served, "bash", "-e", "-o", "pipefail", "-c", f"{before}\n{script(heading, served.port)}")


def test_functions_are_called_and_write_what_peft_writes(served: Served) -> None:
    output, timing = shell(served, CALL)
    shown = [line for _, printed in blocks(CALL) for line in printed.splitlines()]
    assert output.splitlines() == [shown[0], shown[1]], "both answers"
    assert COLD.search(timing), timing
    assert all(f"\n{name}: " in timing for name in ("first token", "per token", "total", "tokens", "finish"))
    found = EQUAL.search(shell(served, COMPARE)[0])
    assert found is not None and found[1] == found[2] and int(found[2]) > 40


@pytest.mark.slow
def test_an_adapter_is_trained_and_deployed_and_rolled_back(served: Served) -> None:
    output, _ = shell(served, TRAIN)
    shown = "".join(printed for _, printed in blocks(TRAIN))
    assert lines_same_everywhere(output) == lines_same_everywhere(shown)


@pytest.mark.slow
def test_any_other_is_deployed_and_listed(served: Served) -> None:
    output, _ = shell(served, DEPLOY, key_command())
    for expected in ("mine: valid", "mine: version 1", '"version":1'):
        assert expected in output, output


@pytest.mark.slow
def test_python_of_both_pages_runs(served: Served) -> None:
    for text in python_scripts():
        assert pasted(served, sys.executable, "-c", text)[0].strip()
