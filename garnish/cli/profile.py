"""`garnish profile`: what cold starts cost on this host, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from garnish.cli.options import DEFAULT_FILE, DEFAULT_STATE, AsJson, File, State


def register(app: typer.Typer) -> None:
    app.command()(profile)


def profile(
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    node_id: Annotated[str, typer.Option("--node-id", help="The node whose profile it becomes.")] = "node-1",
    as_json: AsJson = False,
) -> None:
    """Measure this host for the cold-start planner, while it serves nothing.

    A node without a profile measures a short one when it starts.
    """
    from garnish.config import load_service_file
    from garnish.measurement import run_measurement
    from garnish.screen import Screen
    from garnish.settings import node_config, resolve_base

    service = load_service_file(file)
    config = node_config(
        service, resolve_base(service), state.absolute(), node_id=node_id, gateway_url="http://127.0.0.1"
    ).engine
    with Screen(as_json) as screen:
        found = run_measurement(config, screen.progress)
        screen.end_progress()
        screen.result(found)
        _show(found, Path(config.profile or ""), screen)


def _show(found: dict[str, Any], file: Path, screen: Any) -> None:
    layer = ", ".join(f"{tokens}: {seconds * 1e3:.2f} ms" for tokens, seconds in found["layer"])
    screen.line(f"a layer on the device, by prompt tokens: {layer}")
    link = found["link"]
    screen.line(f"host memory to device: {link['bandwidth'] / 1e9:.2f} GB/s, latency {link['latency'] * 1e6:.0f} us")
    cpu = found["cpu"]
    if cpu is None:
        screen.line("no CPU workers")
    else:
        rate = 1e-9 / cpu["per_product"] if cpu["per_product"] else float("inf")
        screen.line(f"a CPU worker: {cpu['fixed'] * 1e6:.0f} us a handoff, {rate:.1f} billion multiplications a second")
    screen.line(f"written to {file}")
