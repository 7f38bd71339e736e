"""A service file with local pools that `garnish infra` works on by terraform itself, over stand-ins of nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from garnish.provision import Provision
from infra.local.processes import NodeKey, remember
from infra.stack import pool_of
from infra.workspace import PlanNote

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


class Pools:
    """Pool `here` with two nodes, until something else is declared; and no gateway, until one is reached."""

    def __init__(self, folder: Path) -> None:
        self.file, self.state, self.told = folder / "serverless.yml", folder / "state", list[str]()
        self.state.mkdir()
        self.reach("http://127.0.0.1:9")
        self.declare({"here": 2})
        self.running: dict[str, subprocess.Popen[str]] = {}

    def reach(self, gateway: str) -> None:
        """A gateway's URL."""
        (self.state / "credentials.toml").write_text(f'url = "{gateway}"\ntenant = "default"\n')

    def declare(self, pools: dict[str, int], **more: Any) -> None:
        declared = {name: {"backend": "local", "desired": count, "max": max(3, count)} for name, count in pools.items()}
        self.file.write_text(json.dumps({"service": "demo", "base_model": "./model", "node_pools": declared, **more}))

    def provision(self) -> Provision:
        return Provision(self.file, self.state)

    def plan(self) -> list[tuple[str, str, str]]:
        note = self.provision().plan(self.told.append)
        return [(change.action, change.resource, change.reason) for change in note.changes]

    def apply(self) -> PlanNote:
        return self.provision().apply(lambda note: None, self.told.append)

    def start(self, node: str) -> None:
        """What looks like the node, which nothing else has started."""
        key = NodeKey(state=str(self.state), service="demo", pool=pool_of(node), node=node)
        self.running[node] = process = subprocess.Popen(
            [sys.executable, "-c", SLEEP],
            env={**os.environ, **key.environment()},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        remember(key, process.pid)

    def kill(self, node: str) -> None:
        self.running[node].kill()
        self.running[node].wait()

    def made(self) -> Pools:
        """Applied, with a process for each node."""
        self.plan()
        self.apply()
        for node in ("here-1", "here-2"):
            self.start(node)
        return self

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
