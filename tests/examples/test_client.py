"""The client snippets, run as a user runs them, against a service that `garnish up` started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "examples" / "client"
START_LIMIT_S = 200.0
CALL_LIMIT_S = 120.0
PIRATE = "matey"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm_dir: Path) -> Iterator[dict[str, str]]:
    """URL and tenant key of a service with SmolLM2 and one function, as the variables that the snippets take."""
    folder = tmp_path_factory.mktemp("service")
    adapter = ROOT / "examples" / "adapters" / "SmolLM2-135M-Instruct" / "pirate"
    (folder / "serverless.yml").write_text(
        f"service: snippets\nbase_model: {smollm_dir}\nnode: {{device: cpu, dtype: bfloat16}}\n"
        f"tenants:\n  demo: {{}}\nfunctions:\n  pirate:\n    adapter: {adapter}\n"
    )
    port = str(free_port())
    command = [
        Path(sys.executable).parent / "garnish",
        "up",
        "-f",
        "serverless.yml",
        "--state",
        "state",
        "--port",
        port,
    ]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        watchdog = threading.Timer(START_LIMIT_S, up.kill)
        watchdog.start()
        assert up.stdout is not None
        said = []
        for line in up.stdout:
            said.append(line)
            if line.startswith("ready"):
                break
        else:
            pytest.fail("garnish up ended or hung before it was ready:\n" + "".join(said))
        watchdog.cancel()
        credentials = tomllib.loads((folder / "state" / "credentials.toml").read_text())
        yield {"URL": credentials["url"], "KEY": credentials["api_key"]}
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=60)


def run(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, timeout=CALL_LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl(service: dict[str, str]) -> None:
    deployed, invoked, streamed, deleted = run(["bash", str(SNIPPETS / "curl.sh")], service).split("\n# ")
    assert '"version":1' in deployed
    assert PIRATE in invoked
    assert "event: done" in streamed
    assert "HTTP 204" in deleted


def test_openai(service: dict[str, str]) -> None:
    script = str(SNIPPETS / "openai_chat.py")
    question = "What is the capital of France?"
    assert PIRATE in run([sys.executable, script, service["URL"], service["KEY"], "pirate", question], {})


def test_garnish_client(service: dict[str, str]) -> None:
    script = str(SNIPPETS / "garnish_client.py")
    said = run([sys.executable, script], {"GARNISH_URL": service["URL"], "GARNISH_API_KEY": service["KEY"]})
    first, answer, streamed = said.split("\n")[:3]
    assert first == "client-pirate version 1"
    assert PIRATE in answer
    assert streamed == answer
