"""What a benchmark starts ends with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.processes import process
from tests.support.processes import processes

ROOT = Path(__file__).parents[2]
WAIT = ["-c", "import sys; print('here', flush=True); sys.stdin.read()"]
BENCHMARK = """
import sys
from pathlib import Path
from benchmarks.common.processes import process
with process(sys.argv[2:], None, Path(sys.argv[1])) as child:
    print(child.stdout.readline().decode().strip(), child.pid, flush=True)
    sys.stdin.read()
"""


def test_a_killed_benchmark_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path / "log"), *WAIT]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        said, pid = benchmark.stdout.readline().split()
        assert said == "here" and int(pid) in processes()
        benchmark.kill()
    deadline = time.monotonic() + 30
    while processes().get(int(pid), (0, "Z"))[1] != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)


def test_input_environment_and_end_are_the_child_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "so")
    code = "import os, sys; print(os.environ['NAMED'], sys.stdin.read(), flush=True); sys.exit(3)"
    with process(["-c", code], b"told", tmp_path / "log") as child:
        assert child.stdout is not None and child.stdout.read() == b"so told\n"
        assert child.wait(30) == 3
