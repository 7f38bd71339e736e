"""A gateway in a separate process, on a free port, with a new cluster secret."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from adapters.base_model import load_base_model
from benchmarks.common.processes import process
from cluster.secret import create_secret
from tests.support.ports import free_port

GATEWAY = """
import sys, msgspec
from gateway.config import GatewayConfig
from gateway.server import run
run(msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayConfig))
"""
START_SECONDS = 60.0


@dataclass(frozen=True)
class GatewayProcess:
    url: str
    secret: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self, path: str = "/readyz") -> None:
        """Raises RuntimeError if the gateway ends, or does not answer 200 within START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + path, timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the gateway did not get ready:\n{self.log.read_text()[-2000:]}")


@contextmanager
def gateway_process(
    model_dir: Path, registry: str, root: Path, *, code: str = GATEWAY, tree: Path | None = None, **settings: Any
) -> Iterator[GatewayProcess]:
    """Starts a gateway whose files lie in `root`. `settings`: further fields of GatewayConfig; `tree`: as `process`."""
    secret, port, log = create_secret(root / "secret"), free_port(), root / "gateway.log"
    config = {
        "model_dir": str(model_dir), "base_id": load_base_model(model_dir, model_dir.name).id, "registry": registry,
        "secret_file": str(root / "secret"), "tmp_dir": str(root / "uploads"), "port": port, "shutdown_seconds": 1.0,
        **settings,
    }  # fmt: skip
    with process(["-c", code], json.dumps(config).encode(), log, tree) as running:
        yield GatewayProcess(f"http://127.0.0.1:{port}", secret, running, log)
