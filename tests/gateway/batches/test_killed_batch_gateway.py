"""Two gateways over one registry, of which the one that runs a batch is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from stub_node import StubNode, done, stub_node, token
from test_gateway_server import PROGRAM, config, node_of, process, wait_for, worker_of  # noqa: F401  (a fixture)

from adapters.local_store import LocalStore
from cluster.messages import Event, GenerateRequest, Started
from gateway.batches.records import BatchStore
from gateway.batches.run import FLUSH_LINES
from gateway.config import GatewayConfig
from tests.support.ports import free_port

CALLS, ANSWERED = 400, 150
HASTY = "from gateway.batches import runner\nrunner.LEASE_SECONDS, runner.POLL_SECONDS = 2.0, 0.2\n"


async def answer_some(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """All beyond ANSWERED wait until the first gateway is killed."""
    if len(node.received) > ANSWERED:
        await node.until(node.go_on)
    yield Started(node=node.node_id, cold_start="none")
    yield token(0, " t0")
    yield done(asked, 1)


def test_the_other_one_goes_on(config: GatewayConfig, tmp_path: Path) -> None:  # noqa: F811
    port = free_port()
    apart = {"tmp_dir": str(tmp_path / "other" / "uploads"), "usage_dir": str(tmp_path / "other" / "usage")}
    second = msgspec.structs.replace(config, port=port, **apart)
    urls = [f"http://127.0.0.1:{each.port}" for each in (config, second)]
    body = {"model": config.base_id, "max_tokens": 1}
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": str(number)}}
        for number in range(CALLS)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    with (
        stub_node(node_of(config, answer_some)) as node,
        process(config, tmp_path / "one.log", HASTY + PROGRAM) as one,
        httpx.Client(timeout=60, verify=False) as client,
    ):
        wait_for(urls[0], "/healthz", one)
        worker = worker_of(one.pid)
        node.publish(urls[0], max_rows=8)
        files = {"file": ("calls.jsonl", content)}
        uploaded = client.post(f"{urls[0]}/v1/files", files=files, data={"purpose": "batch"}).json()
        asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = client.post(f"{urls[0]}/v1/batches", json=asked).json()["id"]
        written = _until(client, urls[0], batch_id, lambda batch: batch["request_counts"]["completed"] > 0)
        for pid in (one.pid, worker):
            os.kill(pid, signal.SIGKILL)
        node.go_on.set()
        with process(second, tmp_path / "two.log", HASTY + PROGRAM) as two:
            wait_for(urls[1], "/healthz", two)
            node.publish(urls[1], max_rows=64)
            batch = _until(client, urls[1], batch_id, lambda batch: batch["status"] == "completed")
            answers = client.get(f"{urls[1]}/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert 0 < written["request_counts"]["completed"] <= ANSWERED
    assert sorted(json.loads(line)["custom_id"] for line in answers) == sorted(f"c{number}" for number in range(CALLS))
    assert batch["request_counts"] == {"total": CALLS, "completed": CALLS, "failed": 0}
    assert BatchStore(LocalStore(Path(config.registry))).get("default", batch_id).claim >= 2
    assert len(node.received) - CALLS <= FLUSH_LINES + 2 * 8, "what was written was not run again"


def _until(client: httpx.Client, url: str, batch_id: str, condition: Any) -> dict[str, Any]:
    """A test's own time limit bounds it."""
    while not condition(batch := client.get(f"{url}/v1/batches/{batch_id}").json()):
        time.sleep(0.05)
    return batch
