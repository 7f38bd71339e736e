"""What `garnish up` says when the service can be used: the address, the keys and a line to paste."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from garnish.credentials import FILE_NAME, Credentials
from garnish.screen import Screen
from garnish.up.logs import capacity, log_of
from garnish.up.prepare import Prepared
from gateway.schema import DeployReply


def greet(prepared: Prepared, deployed: Sequence[DeployReply], screen: Screen) -> None:
    file = prepared.state / FILE_NAME
    for reply in deployed:
        screen.line(f"function {reply.function}: version {reply.version}")
    show_keys(prepared.state, prepared.credentials, prepared.new_keys, screen)
    for node in prepared.nodes:
        for line in capacity_lines(node.node_id, capacity(log_of(prepared.state, node.node_id))):
            screen.line(line)
    screen.line(f"logs: in {shown(prepared.state / 'logs')}")
    screen.line(f"ready: {prepared.url}")
    screen.line("try:")
    screen.line(f"  {curl_line(prepared, deployed)}")
    screen.result(
        {
            "status": "ready",
            "url": prepared.url,
            "service": prepared.service.service,
            "base_model": prepared.base.id,
            "credentials": str(file),
            "functions": deployed,
        }
    )


def capacity_lines(node: str, found: dict[str, Any] | None) -> list[str]:
    """Empty when the node's log does not tell any more."""
    if found is None:
        return []
    device = ", ".join(f"{count} of rank {rank}" for rank, count in found["device_adapters"].items())
    rank, count = list(found["host_adapters"].items())[1]
    return [
        f"{node} has room for {found['kv_tokens']} tokens of running requests",
        f"{node} has room for adapters (all seven projections): {device}; in host memory {count} of rank {rank}",
    ]


def show_keys(state: Path, credentials: Credentials, new_keys: dict[str, str], screen: Screen) -> None:
    """Keys that were made just now, in full; of the others only where they are."""
    file = shown(state / FILE_NAME)
    if new_keys:
        screen.line(f"keys, shown once (kept for this command line in {file}):")
        for owner, key in new_keys.items():
            screen.line(f"  {owner}: {key}")
    elif credentials.api_key:
        screen.line(f"keys: in {file}")


def curl_line(prepared: Prepared, deployed: Sequence[DeployReply]) -> str:
    """A call that works when it is pasted. A key that was shown before is read from its file, not shown again."""
    credentials = prepared.credentials
    mine = [
        deployment.name for deployment in prepared.deployments if deployment.connection.tenant == credentials.tenant
    ]
    name = next((reply.function for reply in deployed if reply.function in mine), prepared.base.id)
    parts = [f"curl -s {prepared.url}/invoke/{name} -H 'content-type: application/json'"]
    if credentials.api_key in prepared.new_keys.values():
        parts.append(f"-H 'authorization: Bearer {credentials.api_key}'")
    elif credentials.api_key:
        file = shlex.quote(shown(prepared.state / FILE_NAME))
        parts.append(f"""-H "authorization: Bearer $(sed -n 's/^api_key = "\\(.*\\)"$/\\1/p' {file})\"""")
    parts.append(f"-d {shlex.quote(json.dumps(_example(prepared.base.directory)))}")
    return " ".join(parts)


def _example(model: Path) -> dict[str, Any]:
    if (model / "chat_template.jinja").exists():
        return {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    return {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}


def shown(path: Path) -> str:
    """Relative when it is below the working directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
