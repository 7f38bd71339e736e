"""A whole node with the real vLLM: its supervisor starts vLLM again, and nothing outlives the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cluster.messages import Done, Failed, Token
from node_agent.config import VllmConfig
from tests.node_agent.served_node import run_scenario
from tests.node_agent.test_supervisor import Supervised, supervised
from tests.support.processes import processes, tree
from tests.vllm.vllm_process import ARGUMENTS, SETTINGS, living, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def engine_tree(node: Supervised) -> list[int]:
    """Returns the ids of the node's processes."""
    return tree(node.process.pid, processes())


def core(pids: list[int]) -> int:
    """Returns the id of vLLM's engine core."""
    (found,) = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::EngineCor")]
    return found


async def recovers_and_ends(directory: Path, model_dir: Path, python: Path) -> None:
    async with supervised(
        directory, model_dir, engine="vllm", vllm=VllmConfig(str(python), ARGUMENTS), kv_memory=None, threads=None
    ) as node:
        record = await node.ready()
        async with node.generate(record, max_tokens=8, ignore_eos=True) as stream:
            before = await stream.rest()
        assert isinstance(before[-1], Done)
        async with node.generate(record, max_tokens=400, ignore_eos=True, id="cut") as stream:
            while not isinstance(await stream.next(), Token):
                pass
            os.kill(core(engine_tree(node)), signal.SIGKILL)
            assert isinstance((await stream.rest())[-1], Failed)
        record = await node.gateway.record_where(lambda r: r.state != "ready")
        record = await node.ready()
        async with node.generate(record, max_tokens=8, ignore_eos=True, id="again") as stream:
            after = await stream.rest()
        assert isinstance(after[-1], Done)
        tokens = [
            [id for event in events if isinstance(event, Token) for id in event.token_ids] for events in (before, after)
        ]
        assert tokens[0] == tokens[1] and len(tokens[0]) > 0
        pids = engine_tree(node)
        core(pids)
        node.process.kill()
        await asyncio.to_thread(wait_for, lambda: not living(pids[1:]), 30.0)


def test_a_killed_vllm_is_started_again_and_ends_with_its_supervisor(
    tmp_path: Path, base: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    run_scenario(recovers_and_ends(tmp_path, base, python))
