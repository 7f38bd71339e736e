"""`garnish simulate` and `garnish logs`, as processes where that matters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_command_line import garnish

from garnish.logs import for_people
from gateway.calls.trace_log import CALL, Call

MAF = "HashOwner,HashApp,HashFunction,Trigger,1,2\no1,a,f,http,60,90\no2,a,g,timer,30,0\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "maf.csv").write_text(MAF)
    return tmp_path


def test_the_same_seed_gives_the_same_result(trace: Path, command_line: Callable[..., Any]) -> None:
    """Whatever Python's hashes are."""
    runs = [
        garnish(trace, "simulate", "maf.csv", "--nodes", "2", "--seed", "3", "--json", PYTHONHASHSEED=str(seed))
        for seed in (1, 2)
    ]
    assert [done.returncode for done in runs] == [0, 0], runs[0].stderr
    first, second = (json.loads(done.stdout) for done in runs)
    assert first == second
    assert first["simulated"]
    assert (first["format"], first["requests"], first["source"]) == ("maf", 180, "papers")
    summary = first["summary"]
    assert summary["requests"] == summary["done"] + summary["rejected"] == 180
    assert 0 <= summary["attainment"] <= 1
    other = command_line("simulate", "maf.csv", "--nodes", "2", "--seed", "4", "--json")
    assert json.loads(other.stdout)["summary"] != summary


def test_a_sweep_finds_the_smallest_pool_and_plots(trace: Path) -> None:
    options = ("--rate", "12", "--sweep", "nodes=1..6", "--attain", "0.9", "--plot", "found.svg", "--json")
    done = garnish(trace, "simulate", "maf.csv", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pools = {pool["nodes"]: pool["attainment"] for pool in found["sweep"]}
    smallest = found["smallest"]
    assert pools[smallest] >= 0.9
    assert smallest == 1 or pools[smallest - 1] < 0.9
    assert found["summary"]["attainment"] == pools[smallest]
    assert b"Simulated" in (trace / "found.svg").read_bytes() or (trace / "found.svg").stat().st_size > 1000


def test_lines_for_people(trace: Path, command_line: Callable[..., Any]) -> None:
    done = command_line("simulate", "maf.csv", "--policy", "most_idle", "--slo", "ttft=500ms,tpot=60ms")
    assert done.returncode == 0, done.stderr
    assert "policy most_idle" in done.stdout
    assert "SLO: ttft 500.0 ms, tpot 60.0 ms" in done.stdout
    assert "(papers)" in done.stdout
    assert "simulating 8 nodes" in done.stderr
    missing = command_line("simulate", "maf.csv", "--sweep", "nodes=1..1", "--slo", "ttft=1ms")
    assert "no pool up to 1 nodes" in missing.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing.csv",), "can't be read"),
        (("bad.csv",), "bad.csv:2:13: 1: expected a number"),
        (("maf.csv", "--policy", "best"), "'best' does not exist; known: dlora"),
        (("maf.csv", "--profile", "mine"), "neither a file nor one of the committed ones"),
        (("maf.csv", "--slo", "fast"), "expected 'tpt=1.5x'"),
        (("maf.csv", "--plot", "found.nothing"), "can't be drawn"),
    ],
)
def test_failures_are_one_line(
    trace: Path, command_line: Callable[..., Any], arguments: tuple[str, ...], told: str
) -> None:
    (trace / "bad.csv").write_text(MAF.replace("60", "many"))
    done = command_line("simulate", *arguments)
    assert done.returncode == 1
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--sweep", "nodes=9..2"),
        ("--sweep", "2..9"),
        ("--ranks", "8,many"),
        ("--ranks", "0"),
        ("--nodes", "0"),
        ("--rate", "0"),
    ],
)
def test_wrong_usage(trace: Path, command_line: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    assert command_line("simulate", "maf.csv", *arguments).returncode == 2


def entry(at: float, tenant: str, digest: str, **others: object) -> str:
    call = Call(at, tenant, digest, 16 if digest else 0, 1000 if digest else 0, 40, 96)
    line = {"time": "x", "level": "info", "message": CALL, "call": msgspec.to_builtins(call), **others}
    return json.dumps(line) + "\n"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    logs = tmp_path / ".garnish" / "logs"
    logs.mkdir(parents=True)
    (logs / "gateway.log.1").write_text(entry(100.0, "acme", "ab" * 32))
    other = '{"level": "info", "message": "started"}\n' + '{"message": "call ended", "cut'
    (logs / "gateway.log").write_text(entry(101.5, "zoo", "") + other + "\n" + entry(101.0, "zoo", "cd" * 32))
    (logs / "node-1.log").write_text("one\ntwo\n")
    return tmp_path


def test_logs_become_a_trace_that_can_be_simulated(state: Path, command_line: Callable[..., Any]) -> None:
    done = command_line("logs", "--trace")
    assert done.returncode == 0, done.stderr
    assert "acme" not in done.stdout and "zoo" not in done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["at"], line["tenant"], line["function"], line["rank"]) for line in lines] == [
        (0.0, "t1", "ab" * 8, 16), (1.0, "t2", "cd" * 8, 16), (1.5, "t2", "", 0),
    ]  # fmt: skip
    (state / "trace.jsonl").write_text(done.stdout)
    simulated = command_line("simulate", "trace.jsonl", "--nodes", "1", "--json")
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout)["summary"]["done"] == 3
    assert json.loads(command_line("logs", "--trace", "--json").stdout) == lines


def test_logs_are_shown(state: Path, command_line: Callable[..., Any]) -> None:
    assert command_line("logs", "node-1", "-n", "1").stdout == "two\n"
    every = command_line("logs").stdout
    assert for_people("one") == "one" and for_people("\x1b[2J") == "\N{REPLACEMENT CHARACTER}[2J"
    line = {"time": "2026-11-23T18:40:42.784Z", "level": "info", "process": "api", "message": "said"}
    assert for_people(json.dumps(line)) == "18:40:42 INFO  api: said"
    assert "node-1\tone\n" in every and "gateway\t" in every
    assert json.loads(command_line("logs", "node-1", "--json").stdout) == {"node-1": ["one", "two"]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("logs", "../secret"), "no log of '../secret'"),
        (("logs", "--state", "nowhere"), "there are no logs in nowhere"),
        (("logs", "--state", "nowhere", "--trace"), "there are no logs in nowhere"),
    ],
)
def test_logs_that_are_not_there(
    state: Path, command_line: Callable[..., Any], arguments: tuple[str, ...], told: str
) -> None:
    done = command_line(*arguments)
    assert done.returncode == 1
    assert told in done.stderr
