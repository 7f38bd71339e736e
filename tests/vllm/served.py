"""`garnish up` with vLLM as the nodes' engine, and commands in its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port
from tests.vllm.vllm_process import SETTINGS, START_S

ROOT = Path(__file__).parents[2]
STOP_S, COMMAND_S = 90, 600


class Served:
    """`garnish up` in a folder."""

    def __init__(self, folder: Path, service: str) -> None:
        """`service`: text of the service file."""
        self.folder, self.port = folder, free_port()
        (folder / "serverless.yml").write_text(service)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=COMMAND_S,
        )  # fmt: skip

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "garnish.cli.main"]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}

    @contextmanager
    def up(self) -> Iterator[None]:
        arguments = ("up", "--json", "--port", str(self.port), "--state", "state")
        with (self.folder / "err.txt").open("w") as problems:
            process = subprocess.Popen(
                [*self.command, *arguments], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
                stderr=problems, text=True,
            )  # fmt: skip
        killer = threading.Timer(START_S, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), f"{(self.folder / 'err.txt').read_text()}\n{self.logs()}"
            killer.cancel()
            yield
        finally:
            killer.cancel()
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in (self.folder / "state/logs").glob("*"))
