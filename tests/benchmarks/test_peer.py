"""Two servers under the same load by turns, and the ratio of what they did."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import scripted_server

from benchmarks.serve.over_http import CONCURRENCY, Loads, Server, closed_rounds, over_peer

LOADS = Loads(rounds=2, requests=16, pairs=1, prompt_tokens=4, output_tokens=3, seed=0)


def test_both_get_the_same_load() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), scripted_server() as ours, scripted_server() as theirs:
            names = tuple(f"a{i}" for i in range(CONCURRENCY))
            servers = {
                "http": Server(ours.url, "our-key", ("base", *names)),
                "peer": Server(theirs.url, None, ("other-base", *names)),
            }
            rows = await closed_rounds(servers, LOADS)
            assert [(row["round"], row["server"], row["load"]) for row in rows] == [
                (index, server, load) for index in (0, 1) for server in servers for load in ("base", "mixed")
            ]
            assert all((row["ok"], row["output_tokens"]) == (16, 48) for row in rows)
            prompts = [sorted(str(body["prompt"]) for body in server.bodies) for server in (ours, theirs)]
            assert prompts[0] == prompts[1]
            assert {str(body["model"]) for body in theirs.bodies} == {"other-base", *names}
            assert set(ours.keys) == {"Bearer our-key"}
            assert set(theirs.keys) == {None}, "a key went to the other server"

    asyncio.run(scenario())


def test_a_failing_peer_gives_no_figure() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), scripted_server() as theirs:
            await closed_rounds({"peer": Server(theirs.url, None, ("base", "429"))}, LOADS)

    with pytest.raises(RuntimeError, match="429"):
        asyncio.run(scenario())


def test_the_ratio_is_the_rounds_own() -> None:
    speeds = {"http": {"base": [30.0, 60.0, 20.0], "mixed": [10.0, 12.0, 9.0]},
              "peer": {"base": [10.0, 30.0, 20.0], "mixed": [2.0, 3.0, 9.0]}}  # fmt: skip
    rows = [
        {"server": server, "load": load, "round": index, "tok_s": value}
        for server, loads in speeds.items()
        for load, values in loads.items()
        for index, value in enumerate(values)
    ]
    found = over_peer(rows)
    assert (found["over_vllm"], found["over_vllm_min"], found["peer_mixed_tok_s"]) == (4.0, 1.0, 3.0)
    assert (found["over_vllm_base"], found["over_vllm_base_min"]) == (2.0, 1.0)
