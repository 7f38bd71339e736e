"""`garnish logs`: what the processes under `garnish up` have logged, and the calls among it as a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from garnish.cli.options import DEFAULT_STATE, AsJson, State

Process = Annotated[str | None, typer.Argument(help="gateway, or a node's id (default: all).")]
Lines = Annotated[int, typer.Option("-n", "--lines", min=1, max=1_000_000, help="The last lines of each.")]
AsTrace = Annotated[bool, typer.Option("--trace", help="The calls that ended well, as a trace for `garnish simulate`.")]


def register(app: typer.Typer) -> None:
    app.command()(logs)


def logs(
    process: Process = None,
    lines: Lines = 50,
    trace: AsTrace = False,
    state: State = DEFAULT_STATE,
    as_json: AsJson = False,
) -> None:
    """Show the logs under the state directory, or export a trace of all calls that they hold.

    The trace names tenants t1, t2 and adapters by the beginnings of their digests; it holds no prompts and no answers.
    """
    from garnish.logs import last_lines, log_names, trace_lines
    from garnish.screen import Screen

    screen = Screen(as_json)
    if trace:
        if process is not None:
            raise typer.BadParameter("--trace is made of the gateway's log: name no process")
        found = list(trace_lines(state))
        if as_json:
            screen.result(found)
        else:
            for request in found:
                screen.piece(request.line())
        return
    names = [process] if process is not None else log_names(state)
    told = {name: last_lines(state, name, lines) for name in names}
    for name, texts in told.items():
        for text in texts:
            screen.line(f"{name}\t{text}" if process is None else text)
    screen.result(told)
