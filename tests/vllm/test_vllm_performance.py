"""An idle node measures the real vLLM: calls go before the measurement, nothing of it stays, and a restart reads it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from cluster.messages import Adapter
from cluster.performance_file import PerformanceProfile
from node_agent.ipc import ListAdapters
from node_agent.vllm.watch import CHECK_S
from tests.support.peft_reference import Greedy, PeftReference
from tests.vllm.conftest import MakeVllm
from tests.vllm.test_vllm_races import agrees
from tests.vllm.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
MODULE, SECONDS = "tests.vllm.measuring", 900.0
PROMPT, TOKENS = [5, 17, 301, 44, 9], 6


def call(vllm: VllmProcess, adapter: Adapter, expected: Greedy) -> None:
    """Calls an adapter while the node measures; its tokens are right."""
    outcome = vllm.finish(vllm.submit(PROMPT, TOKENS, adapter))
    assert outcome.finished is not None and outcome.finished.reason == "length"
    assert agrees(outcome.tokens, expected)


def wait_for_share(vllm: VllmProcess, share: float) -> None:
    """Waits until this share of the measurement is done, or all of it."""

    def is_done() -> bool:
        found = vllm.stats
        return found is not None and (found.performance is not None or (found.measuring or 0.0) >= share)

    vllm.wait(is_done, SECONDS)


@pytest.mark.slow
def test_an_idle_node_measures_itself_and_calls_go_first(
    make_vllm: MakeVllm, adapter_dirs: list[Path], peft: PeftReference, tmp_path: Path
) -> None:
    profile = tmp_path / "node.json"
    file = tmp_path / "node.performance.json"
    expected = peft.greedy(adapter_dirs[0], PROMPT, TOKENS)
    with make_vllm(module=MODULE, profile=str(profile)) as vllm:
        adapter = vllm.deploy(adapter_dirs[0])
        for share in (0.05, 0.2, 0.5):
            wait_for_share(vllm, share)
            call(vllm, adapter, expected)
        wait_for_share(vllm, 2.0)
        vllm.wait(lambda: vllm.stats is not None and vllm.stats.performance is not None, SECONDS)
        checked = time.monotonic() + 2.5 * CHECK_S  # the node compares its books with the workers meanwhile
        vllm.wait(lambda: time.monotonic() > checked, SECONDS)
        vllm.send(ListAdapters("list"))
        vllm.wait(lambda: "list" in vllm.answers, SECONDS)
        found = vllm.answers["list"].found
        assert found is not None and [state.digest for state in found.adapters] == [adapter.digest]
        assert not vllm.errors()
        folder = vllm.adapters_folder
        assert not list(folder.glob("dummy-*")) and not list(file.parent.glob("*.tmp"))
        call(vllm, adapter, expected)
        published = vllm.stats.performance
    assert published is not None
    stored = msgspec.json.decode(file.read_bytes(), type=PerformanceProfile)
    assert stored.model == published and not stored.thorough
    assert published.decode.base > 0 and published.exposed_share == 1.0
    with make_vllm(module=MODULE, profile=str(profile)) as vllm:
        vllm.wait(lambda: vllm.stats is not None, SECONDS)
        assert vllm.stats is not None and vllm.stats.measuring is None
        assert vllm.stats.performance == published, "a restart reads what was measured"
