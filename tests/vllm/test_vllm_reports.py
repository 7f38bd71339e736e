"""What a node says of the real vLLM: its load, its own metrics, its log; and adapters that come back from the disk."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.messages import Adapter
from cluster.news import VllmLoad
from node_agent.config import DiskCacheConfig
from node_agent.ipc import ReadMetrics
from tests.vllm.conftest import MakeVllm
from tests.vllm.vllm_process import SETTINGS, VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
PROMPT = [5, 17, 301, 44]
STORED = 4
FROM_CPP = re.compile(r"\[Gloo\]|\[W\d{3,4}")
"""Lines that C++ libraries write to the descriptors of vLLM's processes."""


@pytest.fixture(scope="module")
def reporting(
    python: Path, base: Path, adapter_dirs: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    """A process that logs all, has a secret in its environment, and in host memory no room for another adapter beside
    the largest."""
    folder = tmp_path_factory.mktemp("node")
    largest = max(sum(file.stat().st_size for file in directory.iterdir()) for directory in adapter_dirs[:STORED])
    fields = {"host_memory": largest, "disk_cache": DiskCacheConfig(str(folder / "cache"), 1 << 30), "eviction": "lru"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(SETTINGS, "VLLM_LOGGING_LEVEL", "INFO")
        patched.setenv("NODES_API_KEY", str(base))  # vLLM logs the model's path
        with VllmProcess(python, base, folder / "registry", folder, **fields) as running:
            yield running


@pytest.fixture(scope="module")
def stored(reporting: VllmProcess, adapter_dirs: list[Path]) -> list[Adapter]:
    return [reporting.deploy(directory) for directory in adapter_dirs[:STORED]]


def load_of(vllm: VllmProcess) -> VllmLoad:
    assert vllm.stats is not None and vllm.stats.vllm is not None
    return vllm.stats.vllm


def metrics_text(vllm: VllmProcess, question: str) -> str:
    vllm.send(ReadMetrics(question))
    vllm.wait(lambda: question in vllm.answers)
    answer = vllm.answers[question]
    assert not answer.error, answer
    return answer.metrics


def metrics(vllm: VllmProcess, question: str) -> dict[str, float]:
    """Returns vLLM's own metrics, by name; of several values their sum."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics_text(vllm, question)):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)


def test_the_load_is_that_of_vllm_and_ends_with_its_requests(reporting: VllmProcess, stored: list[Adapter]) -> None:
    requests = [reporting.submit(PROMPT, 400, adapter) for adapter in [None, *stored[:2]]]
    reporting.wait(lambda: load_of(reporting).running == len(requests) and load_of(reporting).kv_usage > 0)
    assert metrics(reporting, "busy")["vllm:num_requests_running"] == len(requests)
    for request in requests:
        reporting.cancel(request)
    reporting.wait(lambda: load_of(reporting) == VllmLoad(0, 0, load_of(reporting).kv_usage, 0))
    idle = metrics(reporting, "idle")
    assert (idle["vllm:num_requests_running"], idle["vllm:num_preemptions_total"]) == (0, 0)


def test_vllms_own_metrics_count_what_it_computed(reporting: VllmProcess) -> None:
    before = metrics(reporting, "before")
    tokens = reporting.finish(reporting.submit(PROMPT, 7)).tokens
    after = metrics(reporting, "after")
    assert len(tokens) == 7
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 7
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == len(PROMPT)


def test_adapters_that_left_host_memory_come_from_the_disk(reporting: VllmProcess, stored: list[Adapter]) -> None:
    """Each has the same text as before. They take turns in two slots."""
    outcomes = [reporting.finish(reporting.submit(PROMPT, 6, adapter)) for adapter in stored * 2]
    first, second = outcomes[: len(stored)], outcomes[len(stored) :]
    tiers = {outcome.admitted for outcome in second}
    assert "disk" in tiers and tiers <= {"disk", "host"}
    assert [outcome.tokens for outcome in first] == [outcome.tokens for outcome in second]
    assert len({tuple(outcome.tokens) for outcome in first}) > 1, "the adapters differ"
    for outcome in second:
        assert outcome.finished is not None
        cold = outcome.finished.cold_start
        assert bool(cold.fetch) == (outcome.admitted == "disk") and cold.fetch <= cold.load
    reporting.wait(lambda: reporting.stats is not None and not reporting.stats.running)
    assert reporting.stats is not None
    assert {resident.digest for resident in reporting.stats.residents} == {adapter.digest for adapter in stored}
    assert "disk" in {resident.tier for resident in reporting.stats.residents}
    text = metrics_text(reporting, "adapters")
    assert text.count("vllm:lora_requests_info{") == 1, "of the last step, not of each set that ever ran"


def logged(vllm: VllmProcess) -> list[dict[str, Any]]:
    """Returns the lines of the log, which are all JSON but for those of C++ libraries."""
    lines = [line for line in vllm.log.read_text().splitlines() if not FROM_CPP.match(line)]
    return [json.loads(line) for line in lines]


def test_the_log_has_vllms_records_once_in_the_nodes_format(reporting: VllmProcess, base: Path) -> None:
    lines = logged(reporting)
    of_vllm = [line for line in lines if line["logger"].startswith("vllm.")]
    assert {line["process"] for line in lines} == {"engine"}
    assert {line["level"] for line in of_vllm} >= {"info", "warning"}
    processes = {line.get("vllm", "").rstrip("-0123456789") for line in of_vllm}
    assert processes == {"", "EngineCore", "VllmWorker"}
    (settings,) = [line for line in of_vllm if "Initializing a V1 LLM engine" in line["message"]]
    assert settings["vllm"] == "EngineCore" and "***" in settings["message"]
    assert str(base) not in reporting.log.read_text()
    same = Counter((line.get("vllm"), line["time"], line["message"]) for line in of_vllm)
    assert max(same.values()) == 1, same.most_common(3)


@pytest.mark.slow
def test_a_worker_that_can_not_start_says_why_once(
    make_vllm: MakeVllm, base: Path, tmp_path: Path, python: Path
) -> None:
    """Its weights are cut short."""
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    made = VllmProcess(python, broken, tmp_path / "registry", tmp_path)
    with pytest.raises(RuntimeError, match="did not start"), made:
        pass
    lines = logged(made)
    traces = Counter((line.get("vllm"), line["exception"].splitlines()[-1]) for line in lines if "exception" in line)
    assert any("VllmWorker" in str(process) for process, _ in traces)
    assert max(traces.values()) == 1, traces
