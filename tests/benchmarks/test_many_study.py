"""Whom the study of many adapters calls, what it makes of the answers, and that its services start."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest

from benchmarks.common.invoke import Answer, Caller, prompt_lengths
from benchmarks.common.load import Planned, open_session
from benchmarks.common.processes import service_usage
from benchmarks.many import cells, trace_window
from benchmarks.many.cells import Limits, Load, Oracle, bring_all, measure_limits, operator, row_of, run_cell
from benchmarks.many.many import figures_of
from benchmarks.many.tables import many_table
from benchmarks.many.trace_window import Arrival, Window, draw_window
from garnish.simulation.traces.requests import chat_prompts
from tests.benchmarks.scripted_service import scripted_service
from tests.benchmarks.studies import run_study

MINUTES = 30
WARM = (0.1, 1.0)
"""TTFT and E2E, seconds."""


@pytest.mark.parametrize("seed", range(4))
def test_calls_come_in_the_minutes_of_the_trace(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Function i is called in minute i alone, so that a call's function tells its minute."""
    monkeypatch.setattr(trace_window, "minute_counts", lambda without_top: np.eye(MINUTES, dtype=np.int64))
    monkeypatch.setattr(np.random, "default_rng", rng_without_permutation(np.random.default_rng))
    window = draw_window(MINUTES, 20, seed)
    first = window.arrivals[0].adapter
    assert [each.adapter for each in window.arrivals] == [(first + i) % MINUTES for i in range(20)]
    in_trace = [each.at * window.seconds / 60 / 20 for each in window.arrivals]
    assert [int(at + 1e-9) for at in in_trace[:-1]] == list(range(19))
    assert window.arrivals[-1].at == pytest.approx(20)
    shifted = draw_window(2 * MINUTES, 2 * MINUTES, seed)
    assert sorted(each.adapter for each in shifted.arrivals) == list(range(2 * MINUTES))
    assert shifted == draw_window(2 * MINUTES, 2 * MINUTES, seed)
    with pytest.raises(ValueError, match="have 30 calls"):
        draw_window(MINUTES, MINUTES + 1, seed)


def rng_without_permutation(make: Any) -> Any:
    class Ordered:
        def __init__(self, seed: Any) -> None:
            self._rng = make(seed)

        def permutation(self, n: int) -> np.ndarray:
            return np.arange(n)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._rng, name)

    return Ordered


def test_prompts_are_the_middles_of_the_law() -> None:
    drawn = chat_prompts(200_000, np.random.default_rng(3))
    assert prompt_lengths(10**6) == pytest.approx(np.quantile(drawn, [1 / 8, 3 / 8, 5 / 8, 7 / 8]), rel=0.05)
    assert max(prompt_lengths(64)) == 64


def answer(name: str, state: str = "none", exposed: float = 0.0, e2e: float = 1.0, **rest: Any) -> Answer:
    rest = {"text": " 0 1", "tokens": [0, 1], "gaps": [1.0, 0.2], "prompt": 0} | rest
    return Answer(
        name, scheduled_at=4.5, sent=5.0, times=[5.2, 5.0 + e2e], end=5.0 + e2e, output_tokens=2, state=state,
        exposed_s=exposed, **rest,
    )  # fmt: skip


def test_a_row() -> None:
    limits = Limits(1.0, 0.1, [WARM], {("a0", 0): answer("a0")})
    row = row_of(
        [
            answer("a0"),
            answer("a0", "host", exposed=0.004),
            answer("a0", "host", exposed=0.006),
            answer("a0", "disk", e2e=5.1),
            answer("a0", "absent", text=" 0 2", tokens=[0, 2]),
            answer("a0", text=" 3 1", tokens=[3, 1]),
            answer("a0", text=" 0", tokens=[0]),
            answer("a0", error="429"),
        ],
        limits,
        0.25,
    )
    assert (row["calls"], row["errors"]) == (8, {"429": 1})
    assert row["cold_share"] == pytest.approx(3 / 7)
    assert [row[f"{tier}_share"] for tier in ("device", "host", "absent")] == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert row["goodput"] == pytest.approx(6 / 5.1)
    assert (row["wrong_tokens"], row["ties"]) == (2, 1)
    assert row["ttft_p50_ms"] == pytest.approx(200) and row["late_max_ms"] == pytest.approx(500)


def load(*names: int, warmup: int = 0) -> Load:
    arrivals = [Arrival(float(i), name, i % 2) for i, name in enumerate(names)]
    return Load(Window(arrivals, 60.0), warmup, 0.001, ("x", "y"), 3)


async def limits_of(loads: list[Load]) -> Limits:
    async with scripted_service() as (_, service):
        return await measure_limits(service, loads, long_prompt="x", ranks=["a1", "a2"])


async def cell(calls: Load, limits: Limits, told: bool, resident: bool) -> Any:
    async with scripted_service() as (_, service):
        return await run_cell(service, calls, limits, is_announced=told, resident=resident, tie=0.1)


def test_cells() -> None:
    """Adapters come by calls, or before the first one; what is told is ordered twice for each call."""
    calls = load(1, 2, 1, 2, 3, 1, warmup=2)
    limits = asyncio.run(limits_of([calls, load(4)]))
    assert set(limits.alone) == {("a1", 0), ("a2", 1), ("a1", 1), ("a3", 0), ("a4", 0)}
    assert limits.alone["a1", 0].gaps == [0.5] * 3 and len(limits.warm) == 2 and limits.capacity > 0
    for told, resident in ((False, False), (True, False), (False, True)):
        row = asyncio.run(cell(calls, limits, told, resident))
        assert (row["calls"], row["wrong_tokens"], row["ties"], row["errors"]) == (4, 0, 0, {})
        assert row["prefetch_wasted_bytes"] == 7
        assert row["orders"] == ({"200": 12} if told else {"200": 3} if resident else {})
        if not told:
            assert row["cold_share"] == row["absent_share"]
            assert (row["cold_share"] == 0) == resident


def test_wrong_texts_and_broken_streams_are_seen() -> None:
    broken, liar, alone = asyncio.run(answers())
    assert (broken.error, liar.error, liar.tokens, alone.tokens) == ("in stream", "", [0, 101, 2], [0, 1, 2])
    limits = Limits(1.0, 0.1, [WARM], {("liar", 0): alone})
    assert row_of([liar], limits, 0.4)["wrong_tokens"] == 1
    assert row_of([liar], limits, 0.6)["ties"] == 1
    assert row_of([liar], limits, 0.4)["widest_gap"] == pytest.approx(0.5)


async def answers() -> list[Answer]:
    async with scripted_service() as (_, service), open_session(service.key) as session:
        call, asked = (Caller(session, service.url, ["x"], max_tokens=3, alternatives=count) for count in (None, 2))
        return [
            await call(Planned("broken", "x")),
            await call(Planned("liar", "x")),
            await asked(Planned("liar", "x")),
        ]


def test_adapters_are_ordered_so_many_at_once() -> None:
    asyncio.run(order_many())


async def order_many() -> None:
    async with scripted_service() as (script, service), operator(service) as oracle:
        await bring_all(oracle, (f"a{i}" for i in range(40)))
        assert script.most_orders <= cells.ORACLE_AT_ONCE and len(script.here) == 40
        with pytest.raises(RuntimeError, match=r"refused.*429"):
            await bring_all(oracle, ["refused"])


def test_the_oracle_orders_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2 s and then 0.5 s before each call, in the order of these times."""
    slept: list[float] = []
    brought: list[str] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def bring(_: Oracle, name: str, __: asyncio.Semaphore) -> None:
        brought.append(name)

    monkeypatch.setattr(cells.asyncio, "sleep", sleep)
    monkeypatch.setattr(Oracle, "bring", bring)
    monkeypatch.setattr(cells.time, "perf_counter", lambda: 0.0)
    oracle = Oracle(cast(aiohttp.ClientSession, None), "")
    asyncio.run(oracle.order_ahead([(2.0, "a"), (7.0, "b"), (7.5, "c")]))
    assert slept == [0.0, 1.5, 5.0, 5.5, 6.5, 7.0]
    assert brought == ["a", "a", "b", "c", "b", "c"]


def test_processes_are_counted_with_what_they_started() -> None:
    """A child, named as a gateway is, that waits for a grandchild of 0.3 processor seconds and 32 MB."""
    work = "import time\na = bytes([1]) * (32 << 20)\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    command = [sys.executable, "-c", start, "run_gateway"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        seconds, memory = service_usage(os.getpid())["gateway"]
        child.stdin.write(b"\n")
        child.stdin.close()
    assert seconds >= 0.29 and 32 << 20 <= memory < 200 << 20
    assert "gateway" not in service_usage(os.getpid())


def rows() -> list[dict[str, Any]]:
    """By variant: cold share, goodput and TTFT p95 in the first round; all a tenth worse in the second."""
    stated = {"ondemand": (0.5, 1.0, 400), "eviction": (0.4, 1.2, 300), "forecast": (0.3, 1.5, 200),
              "oracle": (0.2, 1.6, 150)}  # fmt: skip
    rest = dict.fromkeys(("ttft_p50_ms", "e2e_p95_ms", "gateway_cpu_s", "node_cpu_s", "gateway_mb", "node_mb"), 1.0)
    rest |= dict.fromkeys(("device_share", "host_share", "absent_share"), 1 / 3)
    rest |= {"prefetch_useful_bytes": 6e6, "prefetch_late_bytes": 1e6, "prefetch_wasted_bytes": 3e6}
    return [
        {
            "variant": name, "round": number, "cold_share": cold * worse, "goodput": goodput / worse,
            "ttft_p95_ms": ttft * worse, "wrong_tokens": number, "ties": 1, "errors": {}, **rest,
        }
        for number, worse in enumerate((1.0, 1.1))
        for name, (cold, goodput, ttft) in stated.items()
    ]  # fmt: skip


def test_figures_and_tables() -> None:
    found = figures_of(rows())
    assert found["cold_share_ondemand"] == pytest.approx(0.525)
    assert (found["wrong_tokens"], found["ties"]) == (4, 8)
    assert found["share_of_oracle"] == pytest.approx(0.5)
    assert found["goodput_over_ondemand"] == pytest.approx(1.5)
    assert found["ttft_p95_over_ondemand"] == pytest.approx(0.5)
    assert found["prefetch_wasted"] == pytest.approx(0.3)
    settings = {
        "model": "m", "dtype": "bfloat16", "adapters": 1000, "ranks": [8], "bytes": 1e9, "device_bytes": 1e8,
        "host_bytes": 3e8, "link_bytes_s": 1e8,
        "store_bytes_s": 5e7, "calls": 200, "called_adapters": [60, 61], "calls_s": 1.0,
        "utilisation": 0.5, "faster_than_trace": [0.6], "rounds": 2, "probe_before_ms": 1.0, "probe_after_ms": 1.0,
        "variants": ["ondemand", "eviction", "forecast", "oracle"],
    }  # fmt: skip
    versions = dict.fromkeys(("torch", "transformers", "peft"), "1")
    machine = {"cpu": "c", "level": "AVX2", "cores": 2}
    document = {"settings": settings, "rows": rows(), "figures": found, "versions": versions, "machine": machine,
                "commit": "c", "seed": 0}  # fmt: skip
    text = many_table(document)
    assert "| on demand, `lru` | 52.5 % (55.0 %) | 0.00, 0.42 s (0.44 s) |" in text
    assert "12 MB useful, 2 MB late, 6 MB wasted" in " ".join(text.split())
    assert "spare 0.50 of the cold calls" in " ".join(text.split())


@pytest.mark.slow
def test_quick_run(stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    arguments = ["--model", str(stories_dir), "--dtype", "float32", "--rates", "1", "4", "--json", str(file)]
    run_study(monkeypatch, "many.many", "--quick", *arguments)
    for report in (file, tmp_path / "report_4x.json"):
        document = json.loads(report.read_text())
        assert document["figures"]["wrong_tokens"] == 0
        assert [row["variant"] for row in document["rows"]] == ["ondemand", "forecast"]
        for row in document["rows"]:
            assert (row["calls"], row["errors"]) == (8, {})
            assert row["node_cpu_s"] > 0 and row["gateway_mb"] > 0
