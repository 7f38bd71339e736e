"""`garnish logs`: what the processes under `garnish up` have logged, and the calls among it as a trace."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from garnish.cli.options import DEFAULT_STATE, Output, State

Process = Annotated[str | None, typer.Argument(help="gateway, or a node's id (default: all).")]
Lines = Annotated[int, typer.Option("-n", "--lines", min=1, max=1_000_000, help="The last lines of each.")]
AsTrace = Annotated[bool, typer.Option("--trace", help="The calls that ended well, as a trace for `garnish simulate`.")]


def logs(
    output: Output, process: Process = None, lines: Lines = 50, trace: AsTrace = False, state: State = DEFAULT_STATE
) -> None:
    """Show the logs under the state directory, or export a trace of all calls that they hold.

    Lines for people on a terminal; elsewhere, or with GARNISH_LOG=json, as the processes wrote them.

    The trace names tenants t1, t2 and adapters by the beginnings of their digests; it holds no prompts and no answers.
    """
    from cluster.logs import wants_text
    from garnish.logs import for_people, last_lines, log_names, trace_lines

    screen = output.screen()
    if trace:
        if process is not None:
            raise typer.BadParameter("--trace is made of the gateway's log: name no process")
        found = list(trace_lines(state))
        if screen.as_json:
            screen.result(found)
        else:
            for request in found:
                screen.piece(request.line())
        return
    names = [process] if process is not None else log_names(state)
    found_lines = {name: last_lines(state, name, lines) for name in names}
    show = for_people if wants_text(sys.stdout) else str
    for name, texts in found_lines.items():
        for text in texts:
            screen.styled(f"{name}\t{show(text)}" if process is None else show(text))
    screen.result(found_lines)
