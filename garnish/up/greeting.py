"""Output of `garnish up` when the service is ready: the address, the keys and an example command."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from garnish.credentials import DEFAULT_STATE, FILE_NAME, Credentials
from garnish.logs import Capacity, capacity, log_of
from garnish.screen import Screen
from garnish.up.prepare import Prepared
from gateway.routes.deploy import DeployReply

SHOWN_RANK = "16"
"""Rank for which the number of adapters that fit on a node is shown. It is the most common rank."""


def greet(prepared: Prepared, deployed: Sequence[DeployReply], screen: Screen) -> None:
    for reply in deployed:
        screen.line(f"function {reply.function}: version {reply.version}")
    for node in prepared.nodes:
        for line in capacity_lines(node.node_id, capacity(log_of(prepared.state, node.node_id))):
            screen.line(line)
    show_keys(prepared.state, prepared.credentials, prepared.new_keys, screen)
    state_option = (
        "" if prepared.state == DEFAULT_STATE.absolute() else f" --state {shlex.quote(shown(prepared.state))}"
    )
    screen.line(f"logs: in {shown(prepared.state / 'logs')} (garnish logs{state_option})")
    screen.line(f"the console: {prepared.url}/console")
    screen.line(f"the API: {prepared.url}/docs")
    screen.line(f"ready: {prepared.url}")
    screen.line("try:")
    screen.line(f"  {curl_line(prepared, deployed)}")
    screen.result(
        {
            "status": "ready",
            "url": prepared.url,
            "service": prepared.service.service,
            "base_model": prepared.base.id,
            "credentials": str(prepared.state / FILE_NAME),
            "functions": deployed,
        }
    )


def capacity_lines(node: str, reported: Capacity | None) -> list[str]:
    """Returns two lines about the capacity of a node; none if `reported` is None."""
    if reported is None:
        return []
    rates = reported.tokens_per_second
    alone = [f"about {_rate(rates['1'])} tokens/s to one caller"] if "1" in rates else []
    together = [f"{_rate(rate)} to {callers} together" for callers, rate in rates.items() if callers != "1"]
    speed = ", ".join([*alone, *together]) or "tokens per second are not known (garnish profile measures them)"
    few, many = max(reported.device_adapters, key=int), SHOWN_RANK
    return [
        f"{node}: {speed} ({reported.device}, {reported.dtype})",
        f"{node}: room for {reported.device_adapters[many]} adapters of rank {many} "
        f"({reported.device_adapters[few]} of rank {few}), {reported.host_adapters[many]} in host memory",
    ]


def _rate(tokens: float) -> str:
    return f"{tokens:.0f}" if tokens >= 10 else f"{tokens:.1f}"


def show_keys(state: Path, credentials: Credentials, new_keys: dict[str, str], screen: Screen) -> None:
    """Prints new keys in full, and the path of the file that contains all keys."""
    file = shown(state / FILE_NAME)
    if new_keys:
        screen.line(f"keys, shown once (and kept in {file}):")
        for owner, key in new_keys.items():
            screen.line(f"  {owner}: {key}")
    elif credentials.api_key:
        screen.line(f"keys: in {file}")


def curl_line(prepared: Prepared, deployed: Sequence[DeployReply]) -> str:
    """Returns a working curl command with one option per line.

    A new key is in the command. An older key is read by the command from the credentials file.
    """
    credentials = prepared.credentials
    mine = [
        deployment.name for deployment in prepared.deployments if deployment.connection.tenant == credentials.tenant
    ]
    name = next((reply.function for reply in deployed if reply.function in mine), prepared.base.id)
    parts = [f"curl -s {prepared.url}/invoke/{name}", "-H 'content-type: application/json'"]
    if credentials.api_key in prepared.new_keys.values():
        parts.append(f"-H 'authorization: Bearer {credentials.api_key}'")
    elif credentials.api_key:
        file = shlex.quote(shown(prepared.state / FILE_NAME))
        parts.append(f"""-H "authorization: Bearer $(sed -n 's/^api_key = "\\(.*\\)"$/\\1/p' {file})\"""")
    parts.append(f"-d {shlex.quote(json.dumps(_example(prepared.base.directory)))}")
    return " \\\n    ".join(parts)


def _example(model: Path) -> dict[str, Any]:
    if (model / "chat_template.jinja").exists():
        return {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    return {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}


def shown(path: Path) -> str:
    """Returns the path as text. It is relative if the path is below the working directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
