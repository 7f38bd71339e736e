"""The study of cold starts by default settings: its statistics, which calls it compares, and its tables."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.coldstart.calls import CALL_COLUMNS, Column, Draw, ReportedCall, parse_call, rounds
from benchmarks.coldstart.default import _before
from benchmarks.coldstart.figures import calls_of, figures_of, refused
from benchmarks.coldstart.paired import paired_ratio
from benchmarks.coldstart.services import until_idle
from benchmarks.coldstart.tables import default_table
from tests.benchmarks.scripted_service import scripted_service

WAYS = ("full", "pipeline", "overlap", "assist", "cached")


def resampled(
    logs: list[float], seed: int, middle: Callable[[list[float]], float], times: int = 4000
) -> tuple[float, float]:
    """Returns the middle 95 % of what `middle` gives of resamples, computed without numpy."""
    rng = random.Random(seed)
    values = sorted(middle(rng.choices(logs, k=len(logs))) for _ in range(times))
    return values[round(0.025 * times)], values[round(0.975 * times) - 1]


@pytest.mark.parametrize(("seed", "count"), [(1, 12), (2, 40), (3, 100)])
def test_interval_is_that_of_an_independent_bootstrap(seed: int, count: int) -> None:
    rng = random.Random(seed)
    theirs = {i: rng.lognormvariate(5, 1) for i in range(count)}
    ours = {i: value * rng.lognormvariate(0.1, 0.3) for i, value in theirs.items()}
    found = paired_ratio(ours, theirs, 7)
    assert found is not None and found.pairs == count
    ratios = [ours[i] / theirs[i] for i in range(count)]
    assert found.mean == pytest.approx(math.prod(ratios) ** (1 / count))
    assert found.median == pytest.approx(math.exp(median(map(math.log, ratios))))
    for middle, ends in (
        (fmean, (found.lower, found.upper)),
        (median, (found.median_lower, found.median_upper)),
    ):
        expected = resampled([math.log(ratio) for ratio in ratios], seed, middle)
        width = expected[1] - expected[0]
        assert [math.log(end) for end in ends] == pytest.approx(expected, abs=0.15 * width)
    assert paired_ratio(ours, theirs, 7) == found, "the seed decides"


def test_pairs_are_by_key() -> None:
    found = paired_ratio({3: 8.0, 1: 2.0, 9: 100.0}, {1: 1.0, 2: 50.0, 3: 4.0}, 0)
    assert found is not None
    assert (found.mean, found.lower, found.upper, found.pairs) == pytest.approx((2.0, 2.0, 2.0, 2))
    assert paired_ratio({1: 1.0}, {2: 1.0}, 0) is None


def call(number: int, ttft: float, e2e: float, state: str = "host", layers_cpu: int = 0, plan: str = "pipeline") -> str:
    return ReportedCall(number, number, state, plan, layers_cpu, 3, 1.0, 2.0, ttft, e2e).text()


def row(way: str, calls: list[str], part: str = "b", at_once: int = 1, ratio: float = 0.68) -> dict[str, Any]:
    return {
        "part": part, "ratio": ratio, "way": way, "setting": "S3", "rank": 64, "tokens": 64, "at_once": at_once,
        "link_bytes_s": 3e7, "cpu_workers": 1, "reason": "it gains", "cpu_workers_after": 0,
        "columns": CALL_COLUMNS, "calls": calls,
    }  # fmt: skip


def test_a_call_is_read_as_it_was_written() -> None:
    given = ReportedCall(4, 17, "host", "assist", 12, 18, 31.25, 0.0, 310.26, 702.0)
    read = parse_call(given.text())
    assert read == ReportedCall(4, 17, "host", "assist", 12, 18, 31.2, 0.0, 310.3, 702.0)
    assert CALL_COLUMNS.split()[0] == "round" and len(CALL_COLUMNS.split()) == len(given.text().split())


def test_only_calls_from_host_memory_count_and_only_whole_bursts() -> None:
    burst = [call(0, 1, 2), call(0, 3, 4), call(1, 5, 6), call(1, 7, 8, "none"), call(2, 9, 9)]
    cold = row("full", burst, part="c", at_once=2)
    assert [[each.ttft for each in one] for one in calls_of(cold)] == [[1, 3], [9]]
    assert refused(cold) == 2
    warm = row("cached", [call(0, 1, 2, "none"), call(1, 3, 4)])
    assert [[each.ttft for each in one] for one in calls_of(warm)] == [[1]]
    assert refused(warm) == 1


def test_figures_compare_bursts_of_the_same_round() -> None:
    full = row("full", [call(1, 10, 30), call(1, 30, 50), call(0, 8, 16), call(0, 8, 16)], "c", 2)
    other = row("pipeline", [call(0, 4, 8), call(0, 4, 8), call(1, 40, 20), call(1, 40, 20)], "c", 2)
    elsewhere = row("pipeline", [call(0, 1, 1), call(1, 1, 1)], "c", 2, ratio=0.17)
    figures = figures_of([full, other, elsewhere], 0)
    name = "full_over_pipeline_ttft_S3_t64_0.68_burst2"
    assert figures[name] == pytest.approx(math.sqrt(2.0 * 0.5)), "20 over 40 and 8 over 4"
    assert (figures[f"{name}_lower"], figures[f"{name}_upper"]) == pytest.approx((0.5, 2.0))
    assert figures["full_over_pipeline_e2e"] == pytest.approx(2.0)
    assert figures["full_over_pipeline_tpt"] == figures["full_over_pipeline_e2e"]
    assert figures["pairs_pipeline_S3_t64_0.68_burst2"] == 2
    assert (figures["calls"], figures["refused"]) == (10, 0)


def test_the_figure_of_all_columns_has_the_worst_upper_end() -> None:
    rows = [row(way, [call(i, time, time) for i in range(3)]) for way, time in (("full", 6.0), ("assist", 3.0))]
    rows += [row(way, [call(i, 5.0, 5.0) for i in range(3)], ratio=0.17) for way in ("full", "assist")]
    rows += [row(way, [call(i, 5.0, 5.0) for i in range(3)], "c", 1) for way in ("full", "assist")]
    figures = figures_of(rows, 0)
    assert (figures["full_over_assist_ttft"], figures["full_over_assist_ttft_upper"]) == pytest.approx((1.0, 2.0))


def test_pooled_figures_pair_calls_of_the_same_column() -> None:
    rows = [row(way, [call(i, time, time) for i in range(3)]) for way, time in (("full", 6.0), ("assist", 3.0))]
    rows += [
        {**row(way, [call(i, time, time) for i in range(2)]), "tokens": 16}
        for way, time in (("full", 3.0), ("assist", 6.0))
    ]
    rows += [row(way, [call(0, 7.0, 7.0)], ratio=0.17) for way in ("full", "assist")]
    figures = figures_of(rows, 0)
    assert figures["full_over_assist_ttft_b_0.68"] == pytest.approx(2 ** (1 / 5)), "three of 2 and two of 1/2"
    assert figures["full_over_assist_ttft_b_0.68_upper"] == pytest.approx(2.0)
    assert figures["full_over_assist_e2e_b_0.17"] == pytest.approx(1.0)


def decode(way: str, number: int, callers: int, rate: float) -> dict[str, Any]:
    return {"part": "d", "way": way, "round": number, "callers": callers, "tok_s": rate}


def document() -> dict[str, Any]:
    """A report of all parts, as the study writes it."""
    slow = row("full", [call(0, 9, 9, layers_cpu=4, plan="assist"), call(1, 9, 9, layers_cpu=6)])
    rows: list[dict[str, Any]] = [{key: slow[key] for key in ("cpu_workers", "reason", "calls")} | {"part": "a"}]
    rows += [{"part": "e", "cpu_workers": 0, "reason": "little to gain"}]
    for i, (workers, none) in enumerate([(10.0, 10.0), (9.0, 10.0)]):
        for callers in (1, 8):
            rows += [decode("workers", i, callers, workers * callers), decode("none", i, callers, none * callers)]
    for part, at_once in (("b", 1), ("c", 1), ("c", 4)):
        for place, way in enumerate(WAYS):
            state = "none" if way == "cached" else "host"
            calls = [call(i, 100.0 + 10 * place, 240.0, state) for i in range(3) for _ in range(at_once)]
            rows.append(row(way, [*calls, call(9, 1.0, 1.0, "disk")], part, at_once))
    settings = {
        "model": "M", "sizes": {"tokens": 12, "room": 10}, "link_rank": 64, "link_tokens": 256,
        "measured": {"prefill_s": 0.5, "adapter_bytes": 1}, "probes_ms": [3.0, 3.5, 3.2],
    }  # fmt: skip
    versions = dict.fromkeys(("torch", "transformers", "peft"), "1")
    machine = {"cpu": "C", "level": "AVX2", "cores": 2, "gpu": None}
    return {
        "study": "coldstart_default", "commit": "c", "machine": machine, "versions": versions, "settings": settings,
        "seed": 0, "rows": rows, "figures": figures_of(rows, 0),
    }  # fmt: skip


def test_figures_of_the_small_parts() -> None:
    figures = document()["figures"]
    assert (figures["cpu_workers_a"], figures["cpu_workers_e"], figures["layers_cpu_a"]) == (1, 0, 4)
    assert (
        figures["decode_workers_over_none_1"] == figures["decode_workers_over_none_8"] == pytest.approx(math.sqrt(0.9))
    )
    assert figures["decode_workers_over_none_8_lower"] == pytest.approx(0.9)


def test_table() -> None:
    bounds = {"link_bytes": {"figures": {"full_over_cached_S3_t64_0.68": 1.54, "full_over_cached_S3_t64_0.17": 1.0}}}
    text = default_table({"coldstart_default": document(), **bounds})
    lines = text.splitlines()
    assert all(line.count("|") <= 6 for line in lines), "five columns at most"
    assert all(len(line) <= 100 for line in lines if not line.startswith("|"))
    assert lines.count("| S3, 64 tokens: over cached, the bound | 1.54 | - | - | - |") == 1
    assert "| S3, 64 tokens: overlap | 120, 120 | 20, 20 | 240, 240 | 3 pipeline; 1 refused |" in lines
    assert "| S3, 64 tokens: over pipeline | 0.91 (0.91 to 0.91) | 1.00 (1.00 to 1.00) |" in text
    assert "| all: over overlap | 0.83 (0.83 to 0.83) | 1.00 (1.00 to 1.00) |" in text
    for title in ("S3, 64 tokens", "S3, 64 tokens, 1 at once", "S3, 64 tokens, 4 at once"):
        assert all(f"| {title}: {way} |" in text for way in WAYS)
        assert all(f"| {title}: over {way} |" in text for way in WAYS[1:])
    assert "| with workers, 8; 2 pairs | 76.0 | 80.0 | 0.95 (0.90 to 1.00) | 0.95 (0.90 to 1.00) |" in lines
    assert "| no simulation | 0 | little to gain |" in lines
    assert "| 0.68, full | 1, then 0 | it gains |" in lines
    assert "layers computed by CPU workers 4 (assist), 6 (pipeline)." in text
    assert default_table({}) == "Not measured yet."
    alone = default_table({"coldstart_default": document()})
    assert "bound" not in alone


def test_a_report_of_one_part_has_a_table() -> None:
    some = document()
    some["rows"] = [row for row in some["rows"] if row["part"] == "d"]
    some["settings"]["measured"] = {}
    text = default_table({"coldstart_default": some})
    assert "decoding alone" in text and "TTFT" not in text


def test_cold_adapters_are_called_in_turn_by_rank() -> None:
    draw = Draw({64: [0, 1, 2], 32: [3, 4]}, 5000, 1)
    large, small = Column("S3", 64, 20), Column("S1", 32, 7)
    every = range(5)
    wanted = ((large, 2, every), (small, 1, every), (large, 2, every), (small, 2, every))
    called = [[each.model for each in draw.calls(*one)] for one in wanted]
    assert called == [["a0", "a1"], ["a3"], ["a2", "a0"], ["a4", "a3"]]
    assert [each.model for each in draw.calls(large, 1, {0, 2})] == ["a2"], "a1's turn, but it is not cold"
    assert [each.model for each in draw.calls(large, 2, {0})] == ["a0", "a1"], "too few are cold"
    (planned,) = draw.calls(large, 1, every)
    assert len(planned.prompt) == 20 and planned.prompt != draw.prompt(20)
    assert all(100 <= token < 1000 for token in planned.prompt if isinstance(token, int))


def test_all_services_get_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted service has an adapter on the device from its first call on, and counts three tokens in a prompt."""
    rests: list[int] = []

    async def rested(services: Iterable[object]) -> None:
        rests.append(len(list(services)))

    monkeypatch.setattr("benchmarks.coldstart.calls.until_idle", rested)

    async def scenario() -> None:
        async with scripted_service() as (service, cold), scripted_service() as (_, warm):
            services = {"full": cold, "cached": warm}
            draw = Draw({64: range(40)}, 5000, 3)
            numbers = {f"a{i}": i for i in range(40)}
            service.here = {"a3", "a4"}
            columns = [(Column("S3", 64, 3), 1), (Column("S1", 64, 3), 4)]
            found = [each async for each in rounds(services, numbers, columns, draw, warm=2, count=5, tokens=2)]
            assert len(found) == 5 and rests == [1] * 4, "each service by itself, in both rounds before"
            by_way: dict[str, set[Any]] = {"full": set(), "cached": set()}
            for number, cells in enumerate(found):
                assert len(cells) == 4
                for way, column, at_once, calls in cells:
                    assert len({each.adapter for each in calls}) == len(calls) == at_once
                    assert all(each.round == number for each in calls)
                    assert all(each.state == ("none" if way == "cached" else "absent") for each in calls)
                    by_way[way].add((number, column.setting, *(each.adapter for each in calls)))
            assert by_way["full"] == by_way["cached"]
            called = {number for key in by_way["full"] for number in key[2:]}
            assert len(called) == 25 and called.isdisjoint({3, 4}), "none that was on the device"
            wrong = [(Column("S3", 64, 4), 1)]
            with pytest.raises(RuntimeError, match="of a prompt of 4 tokens"):
                await anext(aiter(rounds(services, numbers, wrong, draw, warm=0, count=1, tokens=2)))

    asyncio.run(scenario())


def test_services_are_left_alone_while_a_process_of_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("CHECK_S", 0.01), ("QUIET_S", 0.03), ("IDLE_LIMIT_S", 0.3)):
        monkeypatch.setattr(f"benchmarks.coldstart.services.{name}", seconds)
    services: Any = [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]
    looks, busy_looks = [0], [6]

    def usage(pid: int) -> dict[str, tuple[float, int]]:
        """Process 8 computes until the last busy look, at half a core; process 7 never does."""
        looks[0] += pid == 8
        return {"engine": (0.005 * min(looks[0], busy_looks[0]) * (pid == 8), 0), "api": (1.0, 0)}

    monkeypatch.setattr("benchmarks.coldstart.services.service_usage", usage)
    asyncio.run(until_idle(services))
    assert looks[0] == 6 + 3
    busy_looks[0] = 10**6
    with pytest.raises(TimeoutError, match="still computes"):
        asyncio.run(until_idle(services))


def test_a_run_goes_on_only_with_its_own_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    now = document() | {"settings": {"sizes": {"rounds": (1, 2)}}}
    assert _before(None, now) == _before(file, now) == {}
    file.write_text(json.dumps(now))
    assert _before(file, now)["rows"] == now["rows"]
    for other in ({"commit": "d"}, {"seed": 1}, {"machine": {}}):
        with pytest.raises(ValueError, match=f"another {next(iter(other))}"):
            _before(file, now | other)
    with pytest.raises(ValueError, match="other sizes"):
        _before(file, now | {"settings": {"sizes": {"rounds": (1, 3)}}})
