"""A gateway, a local node pool made by `garnish infra`, and `garnish autoscale`, as an operator runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from garnish.credentials import FILE_NAME, read_credentials
from infra.processes import tagged
from tests.support.ports import free_port

START_LIMIT = 120.0
STOP_LIMIT = 60.0
SIZES = {"adapter_memory": "64MiB", "host_memory": "64MiB", "kv_memory": "64MiB"}


class PoolService:
    """`pool`: what serverless.yml says of the pool `here`. Times are of time.perf_counter."""

    def __init__(self, model_dir: Path, root: Path, pool: dict[str, Any], hold: str) -> None:
        self.root, self.state, self.base = root, root / ".garnish", model_dir.name
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        written = {
            "service": "bench",
            "base_model": str(model_dir),
            "gateway": {"port": port, "hold": hold},
            "node": {"device": "cpu", "dtype": "float32", **SIZES},
            "tenants": {"bench": {}},
            "node_pools": {"here": {"backend": "local", **pool}},
        }
        root.mkdir(parents=True, exist_ok=True)
        (root / "serverless.yml").write_text(json.dumps(written))
        self.decided: list[dict[str, Any]] = []
        """Decisions that the autoscaler printed, each with the time at which it was read (`seen`)."""
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> PoolService:
        try:
            with (self.root / "gateway.log").open("w") as log:
                self._spawn("gateway", stdout=log, stderr=log)
            deadline = time.monotonic() + START_LIMIT
            while (keys := read_credentials(self.state / FILE_NAME)) is None:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the gateway did not start:\n{(self.root / 'gateway.log').read_text()}")
                time.sleep(0.1)
            self.key, self.admin_key = keys.api_key, keys.admin_key
            self._run("infra", "plan")
            self._run("infra", "apply", "--yes")
            scaler = self._spawn("autoscale", "--json", stdout=subprocess.PIPE, stderr=sys.stderr)
            threading.Thread(target=self._read, args=(scaler,), daemon=True).start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for _, node in tagged(str(self.state.absolute()), ""):
            os.kill(node.pid, signal.SIGKILL)

    def _read(self, scaler: subprocess.Popen[str]) -> None:
        assert scaler.stdout is not None
        for line in scaler.stdout:
            self.decided.append({**json.loads(line), "seen": time.perf_counter()})

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "garnish.cli.main", *arguments]

    def _spawn(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command(*arguments), cwd=self.root, text=True, **streams)
        self._processes.append(process)
        return process

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(self._command(*arguments), cwd=self.root, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"garnish {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
