"""What a node refuses, how it says so, and that the next request works."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from cluster.errors import ServiceError
from cluster.messages import PROTOCOL_VERSION, Done, Failed, GenerateRequest, Sampling
from node_agent.api.request import BODY_OVERHEAD, decode_request, read_body
from tests.node_agent.scripted_engine import READY, ScriptedEngine, finished
from tests.node_agent.served_node import Node, request_of, run_scenario, served_node

UNFIT: list[dict[str, Any]] = [
    {"token_ids": []},
    {"token_ids": [512]},
    {"token_ids": [-1]},
    {"max_tokens": 0},
    {"max_tokens": 512},
    {"token_ids": [5] * 413},
    {"timeout": 0.0},
    {"timeout": float("nan")},
    {"timeout": float("inf")},
    {"timeout": 1e300},
    *({"weight": 0.0}, {"weight": float("inf")}, {"ttft": 0.0}, {"tpot": float("nan")}),
    {"sampling": Sampling(seed=-1)},
    {"sampling": Sampling(seed=1 << 63)},
    {"sampling": Sampling(choice=-1)},
    {"max_tokens": (1 << 64) - 1},
    {"token_ids": [(1 << 64) - 1]},
    {"stop": [""]},
    {"stop": ["x"] * 65},
    {"stop": ["x" * 70_000]},
    {"sampling": Sampling(temperature=-1.0)},
    {"sampling": Sampling(temperature=float("nan"))},
    {"sampling": Sampling(temperature=float("inf"))},
    {"sampling": Sampling(top_p=0.0)},
    {"sampling": Sampling(top_p=1.5)},
    {"sampling": Sampling(min_p=-0.1)},
    {"sampling": Sampling(top_k=-1)},
    {"sampling": Sampling(logprobs=65)},
    {"sampling": Sampling(prompt_logprobs=65)},
    {"sampling": Sampling(repetition_penalty=0.0)},
    {"sampling": Sampling(repetition_penalty=float("inf"))},
    {"sampling": Sampling(min_tokens=101)},
    {"sampling": Sampling(min_tokens=-1)},
    {"sampling": Sampling(logit_bias={512: 1.0})},
    {"sampling": Sampling(logit_bias={1: float("nan")})},
    {"sampling": Sampling(stop_token_ids=[-1])},
    {"sampling": Sampling(stop_token_ids=[1] * 70_000)},
    {"sampling": Sampling(bad_words=[[]])},
    {"sampling": Sampling(bad_words=[[3, 512]])},
    {"sampling": Sampling(presence_penalty=float("inf"))},
    {"sampling": Sampling(frequency_penalty=float("nan"))},
]


async def refusal(node: Node, request: Any) -> Failed:
    async with node.generate(request) as stream:
        assert stream.response.status == 200
        (event,) = await stream.rest()
    assert isinstance(event, Failed)
    return event


async def assert_works(node: Node, engine: ScriptedEngine) -> None:
    async with node.generate(request_of("next")) as stream:
        assert (await engine.hear_submit()).id == "next", "nothing that was refused reached the engine"
        await engine.say(finished("next"))
        assert isinstance((await stream.rest())[-1], Done)


def test_what_the_engine_could_not_compute_never_reaches_it(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            for fields in UNFIT:
                failed = await refusal(node, request_of(**fields))
                assert (failed.type, failed.retryable) == ("validation_failed", False), fields
                (name,) = fields
                if isinstance(fields[name], Sampling):
                    name = "sampling"
                assert name == "sampling" or failed.message.startswith((name, "max_tokens")), failed.message
            await assert_works(node, engine)

    run_scenario(scenario())


def test_another_version_of_the_protocol_is_for_another_node(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            for body in (
                *(msgspec.msgpack.encode(request_of(v=PROTOCOL_VERSION + by)) for by in (-1, 1)),
                msgspec.msgpack.encode({"v": 99, "of": "another shape"}),
            ):
                failed = await refusal(node, body)
                assert (failed.type, failed.retryable) == ("unavailable", True)
                assert "version" in failed.message
            await assert_works(node, engine)

    run_scenario(scenario())


def test_garbage_is_refused_and_does_no_harm(tmp_path: Path, stories_dir: Path) -> None:
    whole = msgspec.msgpack.encode(request_of())
    bodies = {
        b"": 400,
        b"\xc1": 400,
        b"{}": 400,
        whole[:-1]: 400,
        msgspec.msgpack.encode([1, 2]): 400,
        msgspec.msgpack.encode({"id": "x"}): 400,
        b"\xdd\xff\xff\xff\xff" * 100: 400,
        bytes(BODY_OVERHEAD + 5 * 512 + 1): 413,
    }

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            for body, status in bodies.items():
                async with node.session.post(node.url + "/generate", data=io.BytesIO(body)) as response:
                    assert response.status == status, body[:20]
                    assert set(await response.json()) == {"error"}
            await assert_works(node, engine)

    run_scenario(scenario())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_an_invalid_one(body: bytes) -> None:
    with contextlib.suppress(ServiceError):  # no other error may come
        assert isinstance(decode_request(body), GenerateRequest)


def test_a_body_that_does_not_come_is_not_awaited_for_ever() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")

    async def scenario() -> None:
        with pytest.raises(ServiceError, match=r"within 0\.01 s") as caught:
            await read_body(Request({"type": "http", "headers": []}, receive), 100, seconds=0.01)
        assert caught.value.type == "invalid_request"

    run_scenario(scenario())


def test_a_node_without_engine_says_so(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            failed = await refusal(node, request_of())
            assert (failed.type, failed.retryable) == ("unavailable", True)
            assert failed.retry_after is not None
            engine = await node.engine()
            await assert_works(node, engine)

    run_scenario(scenario())


def test_another_base_model_is_for_another_node(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            failed = await refusal(node, request_of(base="something else"))
            assert (failed.type, failed.retryable) == ("unavailable", True)
            await assert_works(node, engine)

    run_scenario(scenario())


def test_the_engine_s_context_may_be_smaller_than_the_model_s(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            await node.engine(msgspec.structs.replace(READY, max_context=64))
            failed = await refusal(node, request_of(max_tokens=64))
            assert failed.type == "validation_failed"
            assert "64" in failed.message

    run_scenario(scenario())


def test_a_full_queue_refuses_until_one_is_admitted(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir, queue_limit=2) as node:
            engine = await node.engine()
            async with node.generate(request_of("a")) as first, node.generate(request_of("b")) as second:
                await engine.hear_submit()
                await engine.hear_submit()
                failed = await refusal(node, request_of("c"))
                assert (failed.type, failed.retryable) == ("overloaded", True)
                assert failed.retry_after is not None
                await engine.say(finished("a"))
                await first.rest()
                await assert_works(node, engine)
                await engine.say(finished("b"))
                await second.rest()

    run_scenario(scenario())


def test_a_full_queue_still_takes_who_has_less_waiting(tmp_path: Path, stories_dir: Path) -> None:
    """The engine says who gives way; the caller of that one may try another node."""

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir, queue_limit=2) as node:
            engine = await node.engine()
            async with node.generate(request_of("a")) as first, node.generate(request_of("b")) as second:
                await engine.hear_submit()
                await engine.hear_submit()
                owner = {"tenant": "other", "function": "f", "weight": 2.0}
                promised = {"slo_class": "strict", "ttft": 0.5, "tpot": 0.1}
                async with node.generate(request_of("c", **owner, **promised)) as third:
                    heard = await engine.hear_submit()
                    assert {name: getattr(heard, name) for name in (*owner, *promised)} == owner | promised
                    assert (await refusal(node, request_of("d"))).type == "overloaded"
                    await engine.say(finished("b", "error", error_type="overloaded", error="full"))
                    failed = (await second.rest())[-1]
                    assert isinstance(failed, Failed)
                    assert (failed.type, failed.retryable, failed.retry_after) == ("overloaded", True, 1.0)
                    await engine.say(finished("a"), finished("c"))
                    assert [isinstance((await each.rest())[-1], Done) for each in (first, third)] == [True, True]

    run_scenario(scenario())


def test_an_id_in_flight_is_not_taken_twice(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of("a")) as stream:
                await engine.hear_submit()
                failed = await refusal(node, request_of("a"))
                assert (failed.type, failed.retryable) == ("conflict", False)
                await engine.say(finished("a"))
                assert isinstance((await stream.rest())[-1], Done), "the first one goes on"

    run_scenario(scenario())
