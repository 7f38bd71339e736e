"""Nodes that state the largest rank that they take: deploys above it, and where calls and warm orders go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_gateway import Running, upload

from cluster.device_memory import DeviceMemory
from tests.support.peft_reference import make_adapter

GIB = 1 << 30
VLLM: dict[str, Any] = {"engine": "vllm", "rank_limit": 8}
MEMORY = DeviceMemory(weights=15 * GIB, slot=GIB // 4, slots=8, kv=2 * GIB, runtime=GIB, device=20 * GIB)


@pytest.fixture(scope="module")
def high(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An adapter of rank 12 whose rank_pattern, too, names only ranks above 8."""
    return upload(
        make_adapter(stories_dir, tmp_path_factory.mktemp("high"), 1, r=12, lora_alpha=8, target_modules=["q_proj"])
    )


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 422, response.text
    (problem,) = response.json()["error"]["details"]
    return problem


def test_where_all_nodes_have_a_limit_a_deploy_above_it_is_refused_with_the_sum(
    start: Callable[..., Running], high: dict[str, Any]
) -> None:
    running = start()
    running.node(**VLLM, device_memory=MEMORY)
    running.node(**VLLM | {"rank_limit": 4})
    client = running.client()
    for path in ("/deploy/f", "/deploy/f?dry_run=true"):
        problem = refusal(client.post(path, files=high))
        assert (problem["tensor"], problem["expected"], problem["found"]) == ("adapter_config.json#r", "8", "12")
        assert problem["problem"].startswith(
            "above the largest rank that this service's nodes take (node.vllm.max_lora"
        )
        assert "12 would need 15.0 weights + 4.0 adapter slots (8 x 0.50) + 0.00 keys and values" in problem["problem"]
        assert "= 20.0 GiB of 20.0 GiB on node node-" in problem["problem"]
    assert client.get("/functions/f").status_code == 404


def test_a_node_without_a_limit_takes_the_deploy_and_all_its_calls(
    start: Callable[..., Running], high: dict[str, Any], pirate: dict[str, Any]
) -> None:
    running = start()
    limited, free = running.node(**VLLM), running.node()
    client = running.client()
    assert client.post("/deploy/high", files=high).status_code == 201
    assert client.post("/deploy/low", files=pirate).status_code == 201
    for _ in range(6):
        assert client.post("/invoke/high", json={"prompt": "x"}).status_code == 200
    assert (len(limited.received), len(free.received)) == (0, 6)
    assert client.post("/functions/high/warm", json={"copies": 2}).status_code in (200, 202)
    assert not limited.prefetched and [order.max_rank for order in free.prefetched] == [12]
    free.publish(running.url, state="draining")
    refused = client.post("/invoke/high", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable")
    assert "an adapter of rank 12: the nodes that are ready take ranks up to 8" in refused.json()["error"]["message"]
    warm = client.post("/functions/high/warm", json={})
    assert warm.status_code == 503 and "ranks up to 8" in warm.text
    assert client.post("/invoke/low", json={"prompt": "x"}).status_code == 200
    assert len(limited.received) == 1


def test_a_node_of_our_own_engine_that_starts_takes_any_rank(
    start: Callable[..., Running], high: dict[str, Any]
) -> None:
    running = start()
    running.node(**VLLM)
    starting = running.node(publish=False)
    starting.publish(running.url, state="warming", base="", engine="vllm")
    client = running.client()
    assert refusal(client.post("/deploy/f", files=high))["expected"] == "8"
    starting.publish(running.url, state="warming", base="")
    assert client.post("/deploy/f", files=high).status_code == 201


def test_without_nodes_the_service_files_own_limit_holds(start: Callable[..., Running], high: dict[str, Any]) -> None:
    client = start(max_lora_rank=8).client()
    problem = refusal(client.post("/deploy/f", files=high))
    assert problem["expected"] == "8" and "would need" not in problem["problem"]


def test_rank_patterns_are_named(start: Callable[..., Running], stories_dir: Path, tmp_path: Path) -> None:
    running = start()
    running.node(**VLLM)
    adapter = make_adapter(
        stories_dir, tmp_path / "a", 1, r=4, rank_pattern={"q_proj": 16}, target_modules=["q_proj", "v_proj"]
    )
    problem = refusal(running.client().post("/deploy/f", files=upload(adapter)))
    assert (problem["tensor"], problem["found"]) == ("adapter_config.json#rank_pattern", "16")
