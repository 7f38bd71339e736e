"""The console script `garnish`: assembles the commands, and turns failures into one line and an exit code."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from cluster.printable import printable
from garnish.cli import (
    autoscale,
    batch,
    compare,
    events,
    explain,
    functions,
    infra,
    invoke,
    logs,
    nodes,
    policy,
    profile,
    registry,
    serve,
    simulate,
    usage,
    versions,
    warm,
    webhook_secrets,
)
from garnish.errors import FrontDoorError

DONE, FAILED, INTERRUPTED = 0, 1, 130

app = typer.Typer(
    name="garnish",
    help="Serve LoRA adapters of one base model as if each were a serverless function.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
serve.register(app)
functions.register(app)
versions.register(app)
policy.register(app)
warm.register(app)
invoke.register(app)
events.register(app)
webhook_secrets.register(app)
batch.register(app)
nodes.register(app)
explain.register(app)
compare.register(app)
profile.register(app)
usage.register(app)
logs.register(app)
registry.register(app)
simulate.register(app)
infra.register(app)
autoscale.register(app)


@app.command()
def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    from garnish.screen import Screen

    screen = Screen(as_json)
    screen.line(f"garnish {installed('garnish')}")
    screen.result({"version": installed("garnish")})


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        app(arguments)
    except FrontDoorError as error:
        sys.stderr.write(f"garnish: {printable(error.report())}\n")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; Python would complain about it at exit
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
