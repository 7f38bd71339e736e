"""A service file with local pools that `garnish infra` works on by terraform itself, over stand-ins of nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from garnish.provision import Provision
from infra.processes import NodeKey, write_pid_file
from infra.stack import pool_of
from infra.workspace import SavedPlan

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


class Pools:
    """Pool `here` with two nodes, until something else is declared; and a gateway's port, on which nobody listens yet.

    All are made in one and the same place, one after the other: what Terraform has once applied there is true again
    when it is copied back.
    """

    def __init__(self, place: Path, port: int) -> None:
        folder, self._applied = place / "service", place / "applied"
        shutil.rmtree(folder, ignore_errors=True)
        self.file, self.state, self.told, self.port = folder / "serverless.yml", folder / "state", list[str](), port
        self.state.mkdir(parents=True)
        credentials = f'url = "http://127.0.0.1:{port}"\ntenant = "default"\n'
        (self.state / "credentials.toml").write_text(credentials)
        self.declare({"here": 2})
        self.running: dict[str, subprocess.Popen[str]] = {}

    def declare(self, pools: dict[str, int], **more: Any) -> None:
        declared = {name: {"backend": "local", "desired": count, "max": max(3, count)} for name, count in pools.items()}
        self.file.write_text(json.dumps({"service": "demo", "base_model": "./model", "node_pools": declared, **more}))

    def provision(self) -> Provision:
        return Provision(self.file, self.state)

    def plan(self) -> list[tuple[str, str, str]]:
        note = self.provision().plan(self.told.append)
        return [(change.action, change.resource, change.reason) for change in note.changes]

    def apply(self) -> SavedPlan:
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
        write_pid_file(key, process.pid)

    def kill(self, node: str) -> None:
        self.running[node].kill()
        self.running[node].wait()

    def made(self) -> Pools:
        """Applied, with a process for each node."""
        if self._applied.exists():
            shutil.rmtree(self.state / "infra", ignore_errors=True)
            shutil.copytree(self._applied, self.state / "infra")
        else:
            self.plan()
            self.apply()
            shutil.copytree(self.state / "infra", self._applied)
        for node in ("here-1", "here-2"):
            self.start(node)
        return self

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
