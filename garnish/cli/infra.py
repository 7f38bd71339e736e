"""`garnish infra` and `garnish autoscale`.

`infra` manages the node pools of the service file with Terraform. `autoscale` sets their sizes by their load.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from garnish.cli.options import DEFAULT_FILE, DEFAULT_STATE, File, Output, State, TableOutput, ask, commands
from garnish.screen import Column, Screen

if TYPE_CHECKING:
    from infra.autoscale.rounds import RoundResult
    from infra.workspace import SavedPlan

CHANGES = 2

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def render(
    output: Output,
    out: Annotated[Path, typer.Option("--out", help="Directory for the root module and what it uses.")],
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
) -> None:
    """Write the Terraform files, for users who run Terraform themselves."""
    from garnish.provision import render_to

    screen = output.screen()
    files = render_to(file, state, out)
    for path in files:
        screen.line(str(path))
    screen.result({"files": [str(path) for path in files]})


def plan(
    output: TableOutput,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    detailed: Annotated[
        bool, typer.Option("--detailed-exitcode", help="Exit with 0 when there is nothing to do, with 2 for changes.")
    ] = False,
) -> None:
    """Show what would be created, changed and destroyed, and save that plan."""
    from garnish.provision import Provision

    with output.screen() as screen:
        provision = Provision(file, state)
        saved = provision.plan(screen.progress)
        screen.end_progress()
        _show(saved, screen)
        for line in provision.format_pool_sizes():
            screen.line(line)
        if saved.changes:
            screen.line("the plan is saved: `garnish infra apply` carries it out")
        screen.result({**_result(saved), "sizes": provision.format_pool_sizes()})
    if detailed and saved.changes:
        raise typer.Exit(CHANGES)


def apply(output: TableOutput, file: File = DEFAULT_FILE, state: State = DEFAULT_STATE, yes: Yes = False) -> None:
    """Apply exactly the saved plan."""
    from garnish.provision import Provision

    with output.screen() as screen:

        def confirm(plan: SavedPlan) -> None:
            screen.end_progress()
            _show(plan, screen)
            if plan.changes:
                _confirm(f"carry out {len(plan.changes)} changes?", screen, yes)

        applied = Provision(file, state).apply(confirm, screen.progress)
        screen.end_progress()
        screen.line(f"applied: {_summary(applied)}")
        screen.result(_result(applied))


def destroy(
    output: TableOutput,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    yes: Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Even if the gateway can't drain the nodes first.")] = False,
) -> None:
    """Drain all nodes of the pools and destroy everything that was created for the pools."""
    from garnish.provision import Provision

    with output.screen() as screen:

        def confirm(plan: SavedPlan) -> None:
            screen.end_progress()
            _show(plan, screen)
            _confirm(f"destroy all {len(plan.changes)}?", screen, yes)

        destroyed = Provision(file, state).destroy(confirm, screen.progress, force=force)
        screen.end_progress()
        screen.line(f"destroyed: {len(destroyed.changes)}" if destroyed.changes else "there is nothing to destroy")
        screen.result(_result(destroyed))


def show(output: TableOutput, file: File = DEFAULT_FILE, state: State = DEFAULT_STATE) -> None:
    """Show the pools: the desired sizes, the running nodes, and the differences."""
    from garnish.provision import Provision

    with output.screen() as screen:
        pools = Provision(file, state).show()
        rows = [
            [
                pool.pool, pool.backend, f"{pool.min} {pool.desired} {pool.max}",
                ", ".join(f"{node} {state}" for node, state in pool.nodes.items()) or "-",
                "; ".join(pool.drift) or "-",
            ]
            for pool in pools
        ]  # fmt: skip
        screen.table(
            [
                Column("POOL", min_width=12),
                Column("BACKEND"),
                Column("MIN DESIRED MAX"),
                Column("NODES", min_width=20),
                Column("DRIFT", min_width=20),
            ],
            rows,
        )
        screen.result({"pools": pools})


def _show(plan: SavedPlan, screen: Screen) -> None:
    columns = [
        Column("ACTION"),
        Column("POOL", min_width=12),
        Column("RESOURCE", min_width=16),
        Column("REASON", min_width=16),
        Column("COSTS MONEY", min_width=11),
    ]
    rows = [
        [change.action, change.pool or "-", change.resource, change.reason, "yes" if change.cost else "-"]
        for change in plan.changes
    ]
    if rows:
        screen.table(columns, rows)
    screen.line(_summary(plan))


def _summary(plan: SavedPlan) -> str:
    counts = dict.fromkeys(("create", "change", "replace", "destroy"), 0)
    for change in plan.changes:
        counts[change.action] += 1
    parts = [f"{count} to {action}" for action, count in counts.items() if count]
    costing = sum(change.cost for change in plan.changes)
    return ", ".join(parts) + (f" ({costing} bear on cost)" if costing else "") if parts else "nothing to do"


def _result(plan: SavedPlan) -> dict[str, object]:
    return {"changes": plan.changes, "made_for": plan.made_for, "destroy": plan.destroy}


def _confirm(question: str, screen: Screen, yes: bool) -> None:
    if not yes:
        ask(question, screen, f"{question} Nobody can be asked: say --yes")


def autoscale(
    output: Output,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    once: Annotated[bool, typer.Option("--once", help="One round; it makes no pool smaller.")] = False,
) -> None:
    """Scale the node pools by their load, within their bounds, until Ctrl-C."""
    from garnish.autoscaling import autoscale as scale

    screen, shown = output.screen(), dict[str, tuple[object, ...]]()
    with screen:
        well = scale(file, state, lambda decided: _show_decision(decided, screen, shown, show_all=once), once=once)
    raise typer.Exit(0 if well else 1)


def _show_decision(
    decided: RoundResult, screen: Screen, shown: dict[str, tuple[object, ...]], *, show_all: bool
) -> None:
    """Prints the result of a round for a pool.

    With --json every result is printed. Otherwise it is printed if `show_all` is True, or if it differs from the pool's
    previous one in `shown`, which is updated.
    """

    screen.result({"at": round(time.time(), 3), **msgspec.to_builtins(decided)})
    line = (decided.action, decided.size, decided.wanted, decided.reason if decided.action == "held" else "")
    before = shown.get(decided.pool)
    if show_all or before is None or (before != line and (decided.action != "none" or before[0] == "held")):
        screen.line(f"{decided.pool}: {_format_decision(decided)}")
    shown[decided.pool] = line


def _format_decision(decided: RoundResult) -> str:
    at = "" if decided.size is None else f" at {decided.size}"
    match decided.action:
        case "set" if decided.size != decided.wanted:
            return f"{decided.size} -> {decided.wanted}: {decided.reason}"
        case "held":
            return f"held{at}: {decided.reason}"
        case "waits":
            return f"waits{at}: {decided.reason}"
        case _:
            return f"stays{at}: {decided.reason}"


group = commands(
    {"render": render, "plan": plan, "apply": apply, "destroy": destroy, "show": show},
    name="infra",
    help="Node pools of the service file: plan, apply, destroy, show.",
    no_args_is_help=True,
)
