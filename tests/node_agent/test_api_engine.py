"""The API process before the real engine process, on the small real model: many callers, some of whom leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from cluster.messages import Done, Event, Failed, GenerateRequest, Sampling, Started, Token
from cluster.news import NodeRecord
from cluster.text import BaseText
from node_agent.config import EngineProcessConfig
from tests.node_agent.served_node import Node, node_config, request_of, run_scenario, served_node

ROOT = Path(__file__).parents[2]
PROMPTS = ("", "Once upon a time", "Lily and Ben went to the park", "The dog", "One day, a cat")
SETTINGS = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_memory": 1 << 24}


@pytest.fixture(scope="module")
def place(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a node whose engine process serves one API process after another: each test's own."""
    directory = tmp_path_factory.mktemp("node")
    (directory / "registry").mkdir()
    node = node_config(directory, stories_dir, "unused", **SETTINGS)
    socket = Path(node.run_dir) / "engine.sock"
    config = EngineProcessConfig(socket=str(socket), parent=os.getpid(), engine=node.engine)
    socket.parent.mkdir(mode=0o700)
    command = [sys.executable, "-m", "node_agent.engine_process"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        try:
            yield directory
        finally:
            process.terminate()
        assert process.wait(60) == 0


@contextlib.asynccontextmanager
async def node_with_engine(directory: Path, model_dir: Path) -> AsyncIterator[tuple[Node, NodeRecord]]:
    """A served node whose engine is ready, and the record of it at rest."""
    async with served_node(directory, model_dir, **SETTINGS) as node:
        yield node, await node.record_where(lambda r: r.state == "ready" and r.kv_blocks_free > 0)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token | Done))


async def answer(node: Node, request: GenerateRequest) -> list[Event]:
    async with node.generate(request) as stream:
        return await stream.rest()


async def leave_early(node: Node, request: GenerateRequest, after: int) -> None:
    async with node.generate(request) as stream:
        for _ in range(after):
            await stream.next()
        stream.response.close()


def test_callers_in_a_crowd_get_what_they_get_alone(place: Path, stories_dir: Path) -> None:
    text = BaseText(stories_dir)

    async def scenario() -> None:
        async with node_with_engine(place, stories_dir) as (node, rest):
            requests = [
                request_of(f"r{index}", base=rest.base, token_ids=text.encode_prompt(prompt), max_tokens=40 + index)
                for index, prompt in enumerate(PROMPTS)
            ]
            alone = [await answer(node, request) for request in requests]
            sampled = [
                msgspec.structs.replace(request, id=f"{request.id}-away", sampling=Sampling(seed=7), max_tokens=300)
                for request in requests
            ]
            crowd = asyncio.gather(*(answer(node, request) for request in requests))
            leavers = asyncio.gather(*(leave_early(node, request, 1 + i) for i, request in enumerate(sampled)))
            assert [text_of(events) for events in await crowd] == [text_of(events) for events in alone]
            await leavers
            for request, events in zip(requests, alone, strict=True):
                ids = [token_id for event in events if isinstance(event, Token) for token_id in event.token_ids]
                whole = text.tokenizer.decode([*request.token_ids, *ids])
                assert text.tokenizer.decode(request.token_ids) + text_of(events) == whole
                assert isinstance(events[0], Started)
                assert isinstance(events[-1], Done)
                assert events[-1].completion_tokens == len(ids)
            await node.record_where(
                lambda r: (r.running, r.queued, r.kv_blocks_free) == (0, 0, rest.kv_blocks_free) and not r.contexts
            )

    run_scenario(scenario())


def test_a_stop_string_frees_the_engine(place: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with node_with_engine(place, stories_dir) as (node, rest):
            whole = text_of(await answer(node, request_of("whole", base=rest.base)))
            stop = whole[20:26]
            events = await answer(node, request_of("stopped", base=rest.base, stop=[stop]))
            done = events[-1]
            assert isinstance(done, Done)
            assert done.finish_reason == "stop"
            assert text_of(events) == whole[: whole.index(stop)]
            assert done.completion_tokens < 100
            await node.record_where(lambda r: (r.running, r.kv_blocks_free) == (0, rest.kv_blocks_free))

    run_scenario(scenario())


def test_a_timeout_ends_with_the_text_so_far(place: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with node_with_engine(place, stories_dir) as (node, rest):
            request = request_of("late", base=rest.base, max_tokens=500, ignore_eos=True, timeout=0.25)
            events = await answer(node, request)
            sent, last = sum(isinstance(event, Token) for event in events), events[-1]
            if sent:
                assert isinstance(last, Done)
                assert (last.finish_reason, last.completion_tokens) == ("timeout", sent)
            else:  # on a very busy machine the deadline comes first
                assert isinstance(last, Failed)
                assert last.type in ("timeout", "unavailable")
            await node.record_where(lambda r: (r.running, r.kv_blocks_free) == (0, rest.kv_blocks_free))

    run_scenario(scenario())
