"""`garnish simulate`: runs a trace on simulated nodes, with the gateway's scheduler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from garnish.cli.options import TableOutput
from garnish.screen import Column, Screen

if TYPE_CHECKING:
    from garnish.simulation.outcome import Distribution, Summary
    from garnish.simulation.study import Plan

SWEEP = re.compile(r"nodes=(\d{1,4})\.\.(\d{1,4})")
MAX_NODES = 1024

Trace = Annotated[
    Path, typer.Argument(help="MAF, Azure LLM or ServeGen CSV, Mooncake or `garnish logs --trace` JSONL.")
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, max=MAX_NODES, help="Simulated nodes.")]
Policy = Annotated[str | None, typer.Option("--policy", help="Routing policy (default: the gateway's).")]
Profile = Annotated[str, typer.Option("--profile", help="What a node is: a committed profile's name, or a file.")]
SloText = Annotated[str, typer.Option("--slo", help="As in tpt=1.5x (of the base's), or ttft=500ms,tpot=60ms.")]
Attain = Annotated[float, typer.Option("--attain", min=0.0, max=1.0, help="Attainment that a sweep looks for.")]
Sweep = Annotated[str | None, typer.Option("--sweep", help="nodes=2..60 finds the smallest pool that keeps the SLO.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw distributions into this file (needs matplotlib).")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of everything that is drawn.")]
Rate = Annotated[float | None, typer.Option("--rate", min=1e-6, help="Scale the trace to this rate, requests/s.")]
Seconds = Annotated[float | None, typer.Option("--seconds", min=1e-3, help="Only the first seconds of the trace.")]
Functions = Annotated[
    int | None, typer.Option("--functions", min=1, max=1_000_000, help="Functions, where the trace leaves it open.")
]
Ranks = Annotated[str, typer.Option("--ranks", help="Of functions, where the trace states none.")]


def simulate(
    output: TableOutput,
    trace: Trace,
    nodes: Nodes = 8,
    policy: Policy = None,
    profile: Profile = "papers",
    slo: SloText = "tpt=1.5x",
    attain: Attain = 0.99,
    sweep: Sweep = None,
    plot: Plot = None,
    seed: Seed = 0,
    rate: Rate = None,
    seconds: Seconds = None,
    functions: Functions = None,
    ranks: Ranks = "8,16,32,64",
) -> None:
    """Run a trace on simulated nodes: SLO attainment, TTFT, time per token, cold starts and utilisation.

    Requests are routed by the gateway's code. Durations on nodes come from the performance model in the profile. The
    same seed gives the same result.
    """
    from garnish.simulation.study import make_plan
    from garnish.simulation.traces.requests import TraceOptions

    options = TraceOptions(seed, _ranks(ranks), functions=functions, rate=rate, seconds=seconds)
    bounds = _bounds(sweep) if sweep is not None else None
    with output.screen() as screen:
        screen.progress(f"reading {trace}")
        plan = make_plan(trace, options, profile, slo, policy, seed)
        result = plan.sweep(*bounds, attain, screen.progress) if bounds else plan.run(nodes, screen.progress)
        screen.end_progress()
        _show(screen, plan, result)
        if plot is not None:
            plan.plot(plot, attain)
            screen.line(f"plot: {plot}")
        screen.result({**plan.describe(), **result})


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 512 for part in parts):
        raise typer.BadParameter(f"--ranks: expected numbers from 1 to 512 such as 8,16,32,64, not {text!r}")
    return tuple(int(part) for part in parts)


def _bounds(text: str) -> tuple[int, int]:
    match = SWEEP.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_NODES:
        raise typer.BadParameter(f"--sweep: expected nodes=LOW..HIGH, from 1 to {MAX_NODES}, not {text!r}")
    return int(match[1]), int(match[2])


def _show(screen: Screen, plan: Plan, result: dict[str, Any]) -> None:
    plan_fields = plan.describe()
    screen.line(
        f"trace: {plan_fields['format']}, {plan_fields['requests']} requests of {plan_fields['functions']} functions"
    )
    screen.line(
        f"profile: {plan_fields['profile']} ({plan_fields['source']}); "
        f"policy {plan_fields['policy']}; {plan_fields['slo']}"
    )
    for pool in result.get("sweep", ()):
        screen.line(f"{pool['nodes']:>4} nodes: {pool['attainment']:.2%} within the SLO")
    if "smallest" in result:
        screen.line(_verdict(result))
    if result.get("summary") is not None:
        _show_summary(screen, result["nodes"], result["summary"])


def _verdict(sweep: dict[str, Any]) -> str:
    if sweep["smallest"] is None:
        return f"no pool up to {sweep['high']} nodes reaches {sweep['wanted']:.2%}"
    return f"smallest pool with {sweep['wanted']:.2%}: {sweep['smallest']} nodes (by bisection)"


def _show_summary(screen: Screen, nodes: int, summary: Summary) -> None:
    screen.line(
        f"{nodes} nodes, {summary.seconds:.0f} s simulated: {summary.done} done, {summary.rejected} turned away, "
        f"{summary.attainment:.2%} within the SLO (empty nodes: {summary.attainable:.2%})"
    )
    rows = [
        [name, *_milliseconds(getattr(summary, name.lower()))]
        for name in ("TTFT", "TPT", "TPOT")
    ]  # fmt: skip
    screen.table([Column("MS"), *(Column(name, number=True) for name in ("MEAN", "P50", "P90", "P99"))], rows)
    cold = ", ".join(f"{tier} {count}" for tier, count in summary.cold_starts.items())
    screen.line(f"adapters were found in: {cold} (none: on the device, no cold start)")
    screen.line(
        f"nodes computed {summary.utilisation:.0%} of the time "
        f"(from {summary.least_utilisation:.0%} to {summary.most_utilisation:.0%})"
    )
    if summary.moves:
        screen.line(f"{summary.moves} requests moved to another node")


def _milliseconds(times: Distribution) -> list[str]:
    return [f"{value * 1e3:.1f}" for value in (times.mean, times.p50, times.p90, times.p99)]
