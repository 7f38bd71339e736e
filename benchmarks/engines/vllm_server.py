"""vLLM's own OpenAI server, with the engine arguments that a node would give to vLLM.

On a CPU its workers get the node's LoRA functions, too: those of vLLM 0.32 mix rows, and take longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.common.http_service import LOG_CHARACTERS, START_LIMIT
from benchmarks.common.processes import tethered
from benchmarks.common.report import ROOT
from node_agent.config import EngineConfig
from node_agent.vllm.arguments import engine_arguments
from node_agent.vllm.worker_extension import START_METHOD
from tests.support.ports import free_port

SETTINGS = {"PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Variables of the server: its workers find our extension, and it passes on calls of the extension."""
SWITCHES = ("disable_log_stats", "aggregate_engine_logging", "data_parallel_multi_port_external_lb")
"""Arguments whose options only turn them on."""
CALL_S, END_S = 60.0, 30.0


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields engine arguments as vLLM's command line takes them."""
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is False and name in SWITCHES:
            continue
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif isinstance(value, dict):
            yield from (f"--{option}", json.dumps(value))
        else:
            yield from (f"--{option}", str(value))


class VllmServer:
    """`vllm serve` in a separate process, with the given adapters as a0, a1, ... It has no keys."""

    key = ""

    def __init__(self, config: EngineConfig, adapters: list[Path], root: Path, environment: Mapping[str, str]) -> None:
        """`config`: that of the node to compare with; its interpreter's environment has the command `vllm`."""
        self.base, self._log = config.base_id, root / "vllm.log"
        root.mkdir(parents=True)
        self._environment = os.environ | SETTINGS | dict(environment)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        arguments = engine_arguments(config, config.vllm.arguments["max_loras"])
        passed = {name: value for name, value in arguments.items() if name != "model"}
        modules = [f"a{number}={path}" for number, path in enumerate(adapters)]
        self._command = [
            str(Path(config.vllm.python).parent / "vllm"), "serve", config.model_dir, "--host", "127.0.0.1",
            "--port", str(port), "--disable-uvicorn-access-log", *flags(passed), "--lora-modules", *modules,
        ]  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> VllmServer:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                tethered(self._command), env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_LIMIT
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's server did not start:\n{self._log.read_text()[-LOG_CHARACTERS:]}")
            time.sleep(0.2)
        reply = httpx.post(f"{self.url}/collective_rpc", json={"method": START_METHOD}, timeout=CALL_S)
        reply.raise_for_status()
        return self

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
