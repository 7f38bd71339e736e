"""A gateway whose host can't make its base model's manifest, and a node with the real vLLM that makes and sends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.foreign_bases import TARGETS, write_foreign_base
from tests.support.peft_reference import make_adapter
from tests.support.ports import free_port
from tests.vllm.served import ROOT, STOP_S
from tests.vllm.test_vllm_bases import ARGUMENTS
from tests.vllm.vllm_process import SETTINGS, START_S, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def service_file(folder: Path, base: Path, registry: Path, python: str) -> Path:
    node = {"engine": "vllm", "dtype": "float32", "host_memory": "64MiB", "vllm": {"python": python, **ARGUMENTS}}
    service = {"service": "v", "base_model": str(base), "registry": str(registry), "auth": "none", "node": node}
    folder.mkdir()
    file = folder / "serverless.yml"
    file.write_text(json.dumps(service))
    return file


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Callable[[], str]]:
    """Runs a command of garnish as long as the context lasts, and yields a function that returns its log."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "garnish.cli.main", *arguments], cwd=folder, stdout=out, stderr=out,
            env=os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        yield log.read_text
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=30).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.slow
def test_deploys_and_calls_work_with_the_nodes_manifest(python: Path, stories_dir: Path, tmp_path: Path) -> None:
    base = write_foreign_base("phi3", tmp_path / "phi3", stories_dir)
    adapter = make_adapter(base, tmp_path / "adapter", 5, r=4, lora_alpha=8, target_modules=TARGETS["phi3"])
    registry, port = tmp_path / "registry", free_port()
    url = f"http://127.0.0.1:{port}"
    host = service_file(tmp_path / "gateway", base, registry, "/nowhere/python").parent
    other = service_file(tmp_path / "node", base, registry, str(python)).parent
    with ExitStack() as stack:
        gateway_log = stack.enter_context(running(host, "gateway", "--port", str(port), "--state", "state"))
        wait_for(lambda: status(f"{url}/healthz") == 200, 60.0)
        assert status(f"{url}/readyz") == 503
        assert "a node will send the manifest" in gateway_log()
        secret = str(host / "state" / "cluster.secret")
        node = ("node", "--gateway", url, "--secret-file", secret, "--state", "state")
        node_log = stack.enter_context(running(other, *node))
        wait_for(lambda: status(f"{url}/readyz") == 200, START_S)
        assert "the gateway has stored the base model's manifest" in node_log()
        files: dict[str, Any] = {name: (adapter / name).read_bytes() for name in (
            "adapter_config.json", "adapter_model.safetensors",
        )}  # fmt: skip
        done = httpx.post(f"{url}/deploy/f", files=files, timeout=60)
        assert done.status_code == 201, done.text
        called = httpx.post(f"{url}/invoke/f", json={"prompt": "Once", "max_tokens": 4}, timeout=120)
        assert called.status_code == 200, called.text
        (item,) = httpx.get(f"{url}/nodes", timeout=30).json()["nodes"]
        assert (item["record"]["engine"], item["record"]["rank_limit"]) == ("vllm", 8)
        assert item["record"]["device_memory"]["slots"] == 2
        high = make_adapter(base, tmp_path / "high", 6, r=16, lora_alpha=8, target_modules=["o_proj"])
        files = {name: (high / name).read_bytes() for name in files}
        refused = httpx.post(f"{url}/deploy/high", files=files, timeout=60)
        assert refused.status_code == 422 and "16 would need" in refused.text, refused.text
    assert len(list((registry / "bases").rglob("*.json"))) == 1
