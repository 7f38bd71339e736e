"""The console script `garnish`: assembles the commands, and prints errors as one line with an exit code."""

from __future__ import annotations

import logging
import sys

from cluster.printable import printable
from garnish.cli import (
    base,
    batch,
    compare,
    events,
    explain,
    functions,
    infra,
    invoke,
    nodes,
    profile,
    registry,
    serve,
    simulate,
    usage,
    versions,
)
from garnish.cli.options import Output, commands
from garnish.errors import FrontDoorError

DONE, FAILED, INTERRUPTED = 0, 1, 130


def version(output: Output) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    screen = output.screen()
    screen.line(f"garnish {installed('garnish')}")
    screen.result({"version": installed("garnish")})


app = commands(
    {
        "up": serve.up,
        "gateway": serve.gateway,
        "node": serve.node,
        "deploy": functions.deploy,
        "list": functions.list_functions,
        "describe": functions.describe,
        "delete": functions.delete,
        "alias": versions.alias,
        "rollback": versions.rollback,
        "policy": versions.policy,
        "warm": versions.warm,
        "invoke": invoke.invoke,
        "explain": explain.explain,
        "compare": compare.compare,
        "profile": profile.profile,
        "usage": usage.usage,
        "logs": serve.logs,
        "simulate": simulate.simulate,
        "autoscale": infra.autoscale,
        "version": version,
    },
    name="garnish",
    help="Serve LoRA adapters of one base model as if each were a serverless function.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for group in (events.group, events.secrets, batch.group, nodes.group, registry.group, infra.group, base.group):
    app.add_typer(group)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line with `arguments` (None: those of the process).

    Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app(arguments)
    except FrontDoorError as error:
        sys.stderr.write(f"garnish: {printable(error.report())}\n")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has exited; Python would print an error about that at exit
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
