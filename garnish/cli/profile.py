"""`garnish profile`: what cold starts cost on this host, measured."""

from __future__ import annotations

import subprocess
import sys
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
    import msgspec

    from garnish.config import load_service_file
    from garnish.screen import Screen
    from garnish.settings import node_config, resolve_base

    service = load_service_file(file)
    config = node_config(
        service, resolve_base(service), state.absolute(), node_id=node_id, gateway_url="http://127.0.0.1"
    ).engine
    command = [sys.executable, "-m", "node_agent.profile_process"]
    with Screen(as_json) as screen:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
            found = _follow(process.stdout, screen)
        if found is None or process.returncode:
            raise typer.Exit(1)
        screen.result(found)
        _show(found, Path(config.profile or ""), screen)


def _follow(lines: Any, screen: Any) -> dict[str, Any] | None:
    """Show steps as they begin; the profile, or None when there is none. Raises FrontDoorError."""
    import msgspec

    from garnish.errors import FrontDoorError

    for line in lines:
        message = msgspec.json.decode(line)
        if message.get("type") == "step":
            screen.progress(message["text"])
        elif message.get("type") == "failed":
            raise FrontDoorError(f"the node can't be measured: {message['message']}")
        else:
            screen.end_progress()
            return dict(message)
    return None


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
