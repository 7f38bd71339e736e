"""A node whose engine is killed while its CPU workers compute for a cold prompt: real processes, as they are run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.open_store import open_store
from adapters.registry import Registry
from cluster.messages import Adapter, Done, Failed, Started, Token
from cluster.news import NodeRecord
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from tests.node_agent.coldstart.pools import eventually, state
from tests.node_agent.served_node import run_scenario
from tests.node_agent.test_supervisor import Supervised, supervised, wait_for_end
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter

PROMPT = [1, *range(50, 62)]
"""short: its results have few bytes beside those of the weights, so that workers may take its layers"""
COUNT = 5
pytestmark = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


def deploy(stories_dir: Path, root: Path, directory: Path) -> Adapter:
    registry = Registry(open_store(str(root)), load_base_model(stories_dir))
    registry.deploy(
        "t",
        "f",
        AdapterUpload((directory / "adapter_config.json").read_bytes(), directory / "adapter_model.safetensors"),
    )
    found = registry.resolve("t", "f")
    return Adapter(found.digest, found.artifact_key, found.bytes, found.ranks)


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    found = (task / "children" for task in Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for file in found for child in file.read_text().split()]


def shared_memory(pids: list[int]) -> Counter[str]:
    """How many of the processes map each kind of memfd."""
    found: Counter[str] = Counter()
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found.update({line.split("/memfd:")[1].split()[0] for line in lines if "/memfd:garnish" in line})
    return found


async def tokens(node: Supervised, record: NodeRecord, adapter: Adapter, id: str) -> list[int]:
    fields = {"id": id, "token_ids": PROMPT, "max_tokens": COUNT, "adapter": adapter, "ignore_eos": True}
    async with node.generate(record, **fields) as stream:
        events = await stream.rest()
    assert isinstance(events[-1], Done), events[-1]
    assert events[-1].timing.cold_start.plan == "assist"
    return [token for event in events if isinstance(event, Token) for token in event.token_ids]


async def workers_of(node: Supervised) -> list[int]:
    """The engine's workers, once they sleep: nothing arms them."""
    engine = node.pids["engine"]
    await asyncio.to_thread(eventually, lambda: {state(pid) for pid in children(engine)} == {"S"})
    return children(engine)


def test_a_killed_engine_takes_its_workers_along(tmp_path: Path, stories_dir: Path, reference: PeftReference) -> None:
    directory = make_adapter(stories_dir, tmp_path / "a", 1, r=64, lora_alpha=64, target_modules=ALL_TARGETS)
    adapter = deploy(stories_dir, tmp_path / "registry", directory)
    expected = reference.greedy(directory, PROMPT, COUNT).tokens
    settings = {"cold_start": "assist", "cpu_workers": 1, "load_link": LinkConfig(5e5), "adapter_memory": 8 << 20}

    async def scenario() -> None:
        async with supervised(tmp_path, stories_dir, host_memory=16 << 20, **settings) as node:
            await node.logged("child started", "engine")
            record = await node.ready()
            (worker,) = await workers_of(node)
            engine = node.pids["engine"]
            held = shared_memory([engine, worker])
            assert held.pop("garnish-heartbeat") == 1, "a worker has no use for it"
            assert set(held.values()) == {2} and len(held) == 3

            fields = {"id": "cut", "token_ids": PROMPT, "max_tokens": COUNT, "adapter": adapter, "ignore_eos": True}
            async with node.generate(record, **fields) as stream:
                assert isinstance(await stream.next(), Started)
                await asyncio.to_thread(eventually, lambda: state(worker) == "R")  # armed: it polls or computes
                os.kill(engine, signal.SIGKILL)
                events = await stream.rest()
            assert isinstance(events[-1], Failed) and events[-1].type == "node_failed"
            await asyncio.to_thread(wait_for_end, worker)

            await node.logged("child started", "engine")
            await node.gateway.record_where(lambda r: r.state == "warming")
            again = await node.ready()
            (other,) = await workers_of(node)
            assert await tokens(node, again, adapter, "again") == expected
            assert shared_memory([node.pids["engine"], other]) == held + Counter({"garnish-heartbeat": 1})
            assert {engine, worker}.isdisjoint({node.pids["engine"], other})

    run_scenario(scenario())
