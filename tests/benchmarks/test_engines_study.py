"""The study of both engines: figures by rounds, aims in the table, the calls of a turn, and processes that stand
still."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from scripted_server import ScriptedServer, scripted_server

from benchmarks.engines import turns
from benchmarks.engines.engines import cores_of, loads_of, setup_of
from benchmarks.engines.figures import figures_of
from benchmarks.engines.pinning import on_cores, pin, resume, stop
from benchmarks.engines.servers import ALONE, GARNISH, VLLM, Server, Setup
from benchmarks.engines.tables import speed_table, start_table
from benchmarks.engines.turns import Loads, loads_of_round, measure
from benchmarks.engines.vllm_server import flags
from node_agent.vllm.arguments import engine_arguments
from tests.benchmarks.studies import run_study
from tests.e2e.whole_service import eventually
from tests.support.processes import processes

LOADS = Loads(warm=8, first=2, calls=8, callers=(8,), per_caller=2, prompt_words=3, tokens=4)
VERSIONS = {"torch": "2", "transformers": "5", "peft": "0"}


def row(number: int, server: str, callers: int, tok_s: float, ttft_ms: float) -> dict[str, Any]:
    return {
        "round": number, "server": server, "load": "adapters", "callers": callers, "tok_s": tok_s,
        "ttft_p50_ms": ttft_ms, "ttft_ms": [ttft_ms, 2 * ttft_ms], "by_state": {},
    }  # fmt: skip


ROWS = [
    {"round": 0, "server": server, "load": "start", "start_s": seconds, "memory_bytes": 3 << 30}
    for server, seconds in ((VLLM, 20.0), (ALONE, 30.0))
] + [
    row(number, server, callers, tok_s, ttft_ms)
    for number, (ours, theirs) in enumerate(((8.0, 10.0), (10.0, 10.0), (9.0, 12.0)))
    for callers in (1, 8)
    for server, tok_s, ttft_ms in ((VLLM, ours, 110.0 + number), (ALONE, theirs, 100.0), (GARNISH, 30.0, 50.0))
]


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "commit": "c", "machine": {"cpu": "X", "cores": 2, "level": "AMX"}, "versions": VERSIONS, "seed": 0,
        "figures": figures_of(rows, 0),
        "settings": {
            "model": "m", "dtype": "bfloat16", "vllm": {"vllm": "0.32.0"}, "arguments": {"max_loras": 8,
            "max_lora_rank": 64}, "ranks": [8, 64], "targets": "q,k,v", "prompt_words": 3, "tokens": 4, "rounds": 3,
            "starts": 1, "warm": 8, "callers": [8], "pinned": True, "probe_before_ms": 1.0, "probe_after_ms": 1.0,
        },
    }  # fmt: skip


def test_ratios_and_differences_are_of_the_same_round() -> None:
    figures = figures_of(ROWS, 0)
    assert figures["ratio_adapters_8"] == pytest.approx(0.8)
    assert figures["ratio_adapters_8_min"] == pytest.approx(0.75)
    assert figures["ratio_adapters_8_lower"] <= 0.8 <= figures["ratio_adapters_8_upper"]
    assert figures["engines_adapters_1"] == pytest.approx(30 / 9)
    assert (figures["added_ttft_ms_adapters_1"], figures["added_ttft_ms_adapters_1_max"]) == (11.0, 12.0)
    assert figures[f"ttft_ms_max_{VLLM}_adapters_1"] == 224.0, "the longest call, not the longest median"
    assert figures[f"start_s_{VLLM}"] == 20.0


def test_cold_calls_are_counted_by_where_the_adapter_was() -> None:
    rows = [
        {"round": 0, "server": VLLM, "load": "again", "callers": 1, "by_state": {"none": [5.0], "host": [50.0, 70.0]}},
        {"round": 0, "server": VLLM, "load": "first", "callers": 1, "ttft_ms": [90.0, 80.0, 100.0]},
    ]
    figures = figures_of(rows, 0)
    assert (figures[f"host_ttft_ms_{VLLM}"], figures[f"host_ttft_ms_{VLLM}_max"]) == (60.0, 70.0)
    assert (figures[f"first_ttft_ms_{VLLM}"], figures[f"first_ttft_ms_{VLLM}_count"]) == (90.0, 3)


def test_the_tables_say_which_aims_are_missed() -> None:
    text = speed_table(document(ROWS))
    assert "| 8 adapters, 8 callers | 0.800 (0.750 to 1.000) | 0.750 | at least 0.90: missed |" in text
    assert "at most 8 ms: missed" in text
    better = [
        {**each, "tok_s": 12.0, "ttft_p50_ms": 104.0} if each["server"] == VLLM and each["load"] != "start" else each
        for each in ROWS
    ]
    assert "missed" not in speed_table(document(better))
    assert "| start with 8 adapters (longest of 1) | not measured | 20.0 s (20.0 s) | 30.0 s (30.0 s) |" in start_table(
        document(ROWS)
    )


def served_by(server: ScriptedServer, base: str = "base") -> Server:
    return cast(Server, SimpleNamespace(base=base, url=server.url, key="", pid=0))


def test_servers_get_the_same_calls_and_new_adapters_in_each_round() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(120), scripted_server() as one, scripted_server() as other:
            loads = loads_of_round(LOADS, 3)
            for at, load in enumerate(loads):
                rows = [await measure(served_by(each), load, LOADS.prompt_words, at) for each in (one, other)]
                assert {(row["load"], row["callers"], len(row["ttft_ms"])) for row in rows} == {
                    (load.name, load.callers, load.calls)
                }
            assert sorted(map(str, one.bodies)) == sorted(map(str, other.bodies))
            kinds = [(load.name, load.callers, load.calls) for load in loads]
            single = [("again", 1, 8), ("base", 1, 8), ("adapters", 1, 8)]
            assert kinds == [*single, ("base", 8, 16), ("adapters", 8, 16), ("first", 1, 2)]
            assert [body["model"] for body in one.bodies][-2:] == ["a14", "a15"], "no earlier round has called them"

    asyncio.run(scenario())


def test_calls_by_one_caller_go_round_all_warm_adapters() -> None:
    few = replace(LOADS, calls=3)
    called = [name for number in range(8) for name in loads_of_round(few, number)[2].functions[:3]]
    assert {name: called.count(name) for name in called} == dict.fromkeys([f"a{at}" for at in range(8)], 3)


def test_a_server_that_does_not_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ANSWER_S", 1.0)

    async def scenario() -> None:
        async with asyncio.timeout(60), scripted_server() as server:
            load = loads_of_round(LOADS, 0)[0]
            with pytest.raises(TimeoutError, match="no usage"):
                await measure(served_by(server, "no usage"), load, 3, seed=5)

    asyncio.run(scenario())


def test_the_server_gets_the_engine_arguments_of_the_node() -> None:
    setup = Setup(
        model=Path("/models/m"), python=Path("/env/bin/python"), device="cpu", dtype="bfloat16", max_rows=32,
        kv_memory=1 << 30, adapter_memory=1 << 28, arguments={"max_loras": 8, "max_lora_rank": 64},
    )  # fmt: skip
    config = setup.engine_config()
    found = list(flags(engine_arguments(config, 8)))
    for option, value in (("max-loras", "8"), ("max-cpu-loras", "8"), ("kv-cache-memory-bytes", str(1 << 30))):
        assert found[found.index(f"--{option}") + 1] == value
    assert {"--enable-lora", "--no-enable-prefix-caching"} <= set(found)
    assert not [option for option in found if "log-stats" in option], "vLLM's server has no option for False"
    assert list(flags({"a_b": {"c": 1}})) == ["--a-b", '{"c": 1}']


def test_on_a_gpu_a_7b_gets_32_and_128_callers() -> None:
    options = SimpleNamespace(quick=False, callers=None, python=Path("/env/bin/python"))
    loads = loads_of(cast(Any, options), gpu=True)
    assert loads.callers == (32, 128)
    setup = setup_of(cast(Any, options), Path("/models/7b"), loads, gpu=True)
    assert (setup.device, setup.max_rows, setup.arguments["max_loras"]) == ("cuda", 128, loads.warm)
    assert cores_of(gpu=True) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_a_shape_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_study(monkeypatch, "engines.engines", "--shape", "7b")
    assert "--shape 7b needs a GPU, and none is here" in capsys.readouterr().err


SLEEPER = "import sys, time; sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(600)"


def states(*pids: int) -> set[str]:
    known = processes()
    return {known[pid][1] for pid in pids}


def test_processes_are_pinned_and_stand_still() -> None:
    cores = sorted(os.sched_getaffinity(0))
    computing, others = {cores[-1]}, {cores[0]}
    command = f"['VLLM' + '::Worker', '-c', {SLEEPER!r}]"  # the parent's command line must not have the name
    parent = f"import subprocess, sys; subprocess.run({command}, executable=sys.executable)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None and service.stdout.readline() == "up\n"
        (worker,) = [pid for pid, (above, _) in processes().items() if above == service.pid]
        try:
            assert pin(service.pid, computing, others) == 1
            assert (os.sched_getaffinity(worker), os.sched_getaffinity(service.pid)) == (computing, others)
            stop(service.pid)
            assert eventually(lambda: states(worker, service.pid) == {"T"})
            resume(service.pid)
            assert eventually(lambda: "T" not in states(worker, service.pid))
        finally:
            for pid in (worker, service.pid):
                os.kill(pid, 9)


def test_the_cores_of_this_process_come_back() -> None:
    before = os.sched_getaffinity(0)
    with on_cores({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
