"""`garnish autoscale`: sizes of the node pools, by their load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from garnish.cli.options import DEFAULT_FILE, DEFAULT_STATE, File, Output, State

if TYPE_CHECKING:
    from garnish.screen import Screen
    from infra.autoscale.rounds import Decided


def autoscale(
    output: Output,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    once: Annotated[bool, typer.Option("--once", help="One round; it makes no pool smaller.")] = False,
) -> None:
    """Keep the node pools as large as their load asks, within their bounds, until Ctrl-C."""
    from garnish.autoscaling import autoscale as scale

    screen, shown = output.screen(), dict[str, tuple[object, ...]]()
    with screen:
        well = scale(file, state, lambda decided: _show(decided, screen, shown, every=once), once=once)
    raise typer.Exit(0 if well else 1)


def _show(decided: Decided, screen: Screen, shown: dict[str, tuple[object, ...]], *, every: bool) -> None:
    """Shows what was decided of a pool: with JSON every decision; for people what differs from the pool's last line in
    `shown`, or all of it with `every`."""
    import time

    import msgspec

    screen.result({"at": round(time.time(), 3), **msgspec.to_builtins(decided)})
    line = (decided.action, decided.size, decided.wanted, decided.reason if decided.action == "held" else "")
    before = shown.get(decided.pool)
    if every or before is None or (before != line and (decided.action != "none" or before[0] == "held")):
        screen.line(f"{decided.pool}: {_told(decided)}")
    shown[decided.pool] = line


def _told(decided: Decided) -> str:
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
