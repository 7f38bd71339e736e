"""Deaths and standstills of vLLM's processes in each of its phases: each ends the engine process within a bound, and
leaves no process, no folder and no shared memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import MakeVllm
from tests.vllm.vllm_process import VllmProcess, assert_ended, core_and_worker, living, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
PROMPT = [5, 17, 301, 44]
ANSWER_S = 8.0
START_TIMEOUT_S = 60
"""vLLM's own bound on its start, in these tests"""
CORE, WORKER = 0, 1
VICTIMS = {"core": CORE, "worker": WORKER}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

Phase = Callable[[VllmProcess, list[Path]], None]


def be_idle(vllm: VllmProcess, adapter_dirs: list[Path]) -> None:
    """One adapter has been loaded and used."""
    vllm.finish(vllm.submit(PROMPT, 2, vllm.deploy(adapter_dirs[0])))
    vllm.wait_until_idle()


def load(vllm: VllmProcess, adapter_dirs: list[Path]) -> None:
    """The worker stands still before the load reaches it."""
    os.kill(core_and_worker(vllm)[WORKER], signal.SIGSTOP)
    request = vllm.submit(PROMPT, 2, vllm.deploy(adapter_dirs[0]))
    vllm.wait(lambda: vllm.outcomes[request].admitted and vllm.stats is not None and vllm.stats.loading_bytes)


def prefill(vllm: VllmProcess, adapter_dirs: list[Path]) -> None:
    """The worker stands still before the prompt's pass reaches it."""
    os.kill(core_and_worker(vllm)[WORKER], signal.SIGSTOP)
    request = vllm.submit(PROMPT, 2)
    vllm.wait(lambda: vllm.outcomes[request].admitted)


def decode(vllm: VllmProcess, adapter_dirs: list[Path]) -> None:
    """More adapters than there are slots are called, and the base model."""
    adapters = [vllm.deploy(directory) for directory in adapter_dirs[:3]]
    requests = [vllm.submit(PROMPT, 400, adapter) for adapter in [None, *adapters]]
    vllm.wait(lambda: all(len(vllm.outcomes[request].tokens) > 3 for request in requests[:2]))


PHASES: dict[str, Phase] = {"idle": be_idle, "load": load, "prefill": prefill, "decode": decode}
QUICK = {("decode", "core", "kill")}
CASES = [(phase, victim, number) for phase in PHASES for victim in VICTIMS for number in SIGNALS]


def hit(vllm: VllmProcess, victim: str, number: str) -> None:
    """Sends the signal. A worker that stood still goes on where the core is to stand still."""
    pids = core_and_worker(vllm)
    os.kill(pids[VICTIMS[victim]], SIGNALS[number])
    if (victim, number) == ("core", "stop"):
        os.kill(pids[WORKER], signal.SIGCONT)


@pytest.mark.parametrize(
    ("phase", "victim", "number"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_dead_or_stopped_process_of_vllm_ends_the_engine(
    make_vllm: MakeVllm, adapter_dirs: list[Path], phase: str, victim: str, number: str
) -> None:
    with make_vllm(answer_s=ANSWER_S) as vllm:
        PHASES[phase](vllm, adapter_dirs)
        vllm.record_parts()
        assert vllm.sockets and vllm.shared_memory
        hit(vllm, victim, number)
        assert_ended(vllm)
        (error,) = vllm.errors()
        assert error["message"] == "vLLM has ended", error
        if number == "stop":
            assert "has not answered" in error["reason"], error
        assert len(vllm.folders) == 2


def is_there(vllm: VllmProcess, victim: str) -> bool:
    """Whether vLLM has started this process."""
    assert vllm.process.poll() is None, vllm.errors()
    with suppress(ValueError):
        return core_and_worker(vllm)[VICTIMS[victim]] > 0
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", list(SIGNALS))
@pytest.mark.parametrize("victim", list(VICTIMS))
def test_a_start_that_loses_a_process_fails(make_vllm: MakeVllm, victim: str, number: str) -> None:
    settings: dict[str, Any] = {"environment": {"VLLM_ENGINE_READY_TIMEOUT_S": str(START_TIMEOUT_S)}}
    with make_vllm(waits=False, **settings) as vllm:
        wait_for(lambda: is_there(vllm, victim), START_TIMEOUT_S)
        vllm.record_parts()
        os.kill(core_and_worker(vllm)[VICTIMS[victim]], SIGNALS[number])
        assert_ended(vllm, seconds=2 * START_TIMEOUT_S)
        (error,) = vllm.errors()
        assert error["message"] == "engine can't start", error
        assert error["reason"] and not error["permanent"], error


@pytest.mark.slow
def test_nothing_of_vllm_outlives_the_engine_process(make_vllm: MakeVllm, adapter_dirs: list[Path]) -> None:
    """Not even a worker that is stopped."""
    with make_vllm() as vllm:
        requests = [vllm.submit(PROMPT, 400, vllm.deploy(directory)) for directory in adapter_dirs[:2]]
        vllm.wait(lambda: vllm.outcomes[requests[0]].tokens)
        vllm.record_parts()
        assert len(vllm.tree) > 2 and vllm.shared_memory
        os.kill(core_and_worker(vllm)[WORKER], signal.SIGSTOP)
        os.kill(vllm.process.pid, signal.SIGKILL)
        vllm.process.wait()
        wait_for(lambda: not living(vllm.tree), 10)
        wait_for(lambda: not [path for path in vllm.shared_memory if path.exists()], 10)


@pytest.mark.slow
def test_a_vllm_that_mixes_rows_is_refused(make_vllm: MakeVllm) -> None:
    with pytest.raises(RuntimeError, match="other tokens next to adapters"), make_vllm(module="tests.vllm.unmended"):
        pass
