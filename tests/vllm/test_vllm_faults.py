"""Deaths and standstills of vLLM's processes: each ends the engine process within a bound, and leaves nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import processes
from tests.vllm.conftest import MakeVllm
from tests.vllm.vllm_process import VllmProcess, living, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
PROMPT = [5, 17, 301, 44]
ANSWER_S = 8.0
BOUND_S = 60.0


def core_and_worker(vllm: VllmProcess) -> tuple[int, int]:
    """Returns the ids of vLLM's engine core and of its worker."""
    known = processes()
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in vllm.tree}
    (core,) = [pid for pid in vllm.tree if names[pid].startswith("VLLM::EngineCor")]
    (worker,) = [pid for pid in vllm.tree if known[pid][0] == core and names[pid].startswith("VLLM::Worker")]
    return core, worker


def assert_ended(vllm: VllmProcess, code: int = 1) -> None:
    """The engine process ends with this code, with all of vLLM's processes."""
    assert vllm.process.wait(BOUND_S) == code
    wait_for(lambda: not living(vllm.tree), BOUND_S)
    assert vllm.gone or vllm.wait(lambda: vllm.gone) is None


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_dead_or_stopped_process_of_vllm_ends_the_engine(
    make_vllm: MakeVllm, adapter_dirs: list[Path], victim: int, number: int
) -> None:
    with make_vllm(answer_s=ANSWER_S) as vllm:
        adapters = [vllm.deploy(directory) for directory in adapter_dirs[:3]]
        requests = [vllm.submit(PROMPT, 400, adapter) for adapter in [None, *adapters]]
        vllm.wait(lambda: len(vllm.outcomes[requests[0]].tokens) > 3)
        os.kill(core_and_worker(vllm)[victim], number)
        assert_ended(vllm)
        (error,) = vllm.errors()
        assert error["message"] == "vLLM has ended", error
        assert vllm.folders and not any(folder.exists() for folder in vllm.folders)


@pytest.mark.slow
def test_a_process_of_vllm_that_stands_still_is_found_while_idle(make_vllm: MakeVllm) -> None:
    with make_vllm(answer_s=ANSWER_S) as vllm:
        os.kill(core_and_worker(vllm)[1], signal.SIGSTOP)
        assert_ended(vllm)
        (error,) = vllm.errors()
        assert "has not answered" in error["reason"]


def test_nothing_of_vllm_outlives_the_engine_process(make_vllm: MakeVllm, adapter_dirs: list[Path]) -> None:
    """Not even a worker that is stopped."""
    with make_vllm() as vllm:
        requests = [vllm.submit(PROMPT, 400, vllm.deploy(directory)) for directory in adapter_dirs[:2]]
        vllm.wait(lambda: vllm.outcomes[requests[0]].tokens)
        assert len(vllm.tree) > 2
        os.kill(core_and_worker(vllm)[1], signal.SIGSTOP)
        os.kill(vllm.process.pid, signal.SIGKILL)
        vllm.process.wait()
        wait_for(lambda: not living(vllm.tree), 10)


def test_a_vllm_that_mixes_rows_is_refused(make_vllm: MakeVllm) -> None:
    with pytest.raises(RuntimeError, match="other tokens next to adapters"), make_vllm(module="tests.vllm.unmended"):
        pass
