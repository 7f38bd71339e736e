"""How requests end other than by themselves: stop strings, callers that go or dawdle, engines that die or hang."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from cluster.messages import Done, Event, Failed, Sampling, Started, Token
from cluster.text import BaseText
from node_agent.api.requests import EVENT_LIMIT
from node_agent.ipc import Generated, Top
from tests.node_agent.scripted_engine import ScriptedEngine, admitted, finished, tokens
from tests.node_agent.served_node import Node, request_of, run_scenario, served_node


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token | Done))


async def assert_empty(node: Node) -> None:
    """No place is taken any more, and the next request works."""
    await node.record_where(lambda r: r.running == 0 and r.queued == 0)


def test_a_stop_string_across_tokens_ends_the_request(tmp_path: Path, stories_dir: Path) -> None:
    ids = BaseText(stories_dir).encode_prompt("Once upon a time, there was a little girl")[1:]

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of(stop=["n a ti", "there"])) as stream:
                await engine.hear_submit()
                await engine.say(admitted("r1"), *tokens("r1", ids[:5]))
                assert (await engine.hear_cancel()).id == "r1"
                await engine.say(*tokens("r1", ids[5:]), finished("r1", "cancelled"))
                events = await stream.rest()
            done = events[-1]
            assert isinstance(done, Done)
            assert (text_of(events), done.finish_reason) == ("Once upo", "stop")
            sent = [event for event in events if isinstance(event, Token)]
            assert done.completion_tokens == len(sent)
            text = BaseText(stories_dir).tokenizer.decode(ids[: len(sent)])
            assert "n a ti" in text, "tokens count up to the one that completes the stop string"
            assert "n a ti" not in BaseText(stories_dir).tokenizer.decode(ids[: len(sent) - 1])
            await assert_empty(node)

    run_scenario(scenario())


def test_what_only_looked_like_a_stop_string_comes_at_the_end(tmp_path: Path, stories_dir: Path) -> None:
    ids = BaseText(stories_dir).encode_prompt("Once upon a")[1:]

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of(stop=[" a time"])) as stream:
                await engine.hear_submit()
                await engine.say(*tokens("r1", ids), finished("r1", "length"))
                events = await stream.rest()
            assert isinstance(events[-1], Done)
            assert (events[-1].text, events[-1].finish_reason) == (" a", "length")
            assert text_of(events) == "Once upon a"

    run_scenario(scenario())


def test_a_stop_string_with_the_last_token_is_a_stop(tmp_path: Path, stories_dir: Path) -> None:
    ids = BaseText(stories_dir).encode_prompt("Once upon")[1:]

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of(stop=["upon"])) as stream:
                await engine.hear_submit()
                await engine.say(*tokens("r1", ids), finished("r1", "length"))
                events = await stream.rest()
            assert isinstance(events[-1], Done)
            assert (text_of(events), events[-1].finish_reason) == ("Once ", "stop")

    run_scenario(scenario())


@pytest.mark.parametrize("reason", ["stop", "length", "timeout", "cancelled"])
def test_finish_reasons_are_passed_on(tmp_path: Path, stories_dir: Path, reason: str) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of()) as stream:
                await engine.hear_submit()
                await engine.say(*tokens("r1", [403]), finished("r1", reason))
                done = (await stream.rest())[-1]
            assert isinstance(done, Done)
            assert done.finish_reason == reason

    run_scenario(scenario())


@pytest.mark.parametrize(
    ("type", "sent", "retryable"),
    [("unavailable", 0, True), ("unavailable", 1, False), ("too_large", 0, False), ("internal", 0, True)],
)
def test_an_error_of_the_engine_is_passed_on(
    tmp_path: Path, stories_dir: Path, type: str, sent: int, retryable: bool
) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of()) as stream:
                await engine.hear_submit()
                ending = finished("r1", "error", error_type=type, error="what happened")
                await engine.say(*tokens("r1", [403] * sent), ending)
                assert (await stream.rest())[-1] == Failed(type=type, message="what happened", retryable=retryable)
            await assert_empty(node)

    run_scenario(scenario())


def test_a_caller_that_goes_cancels(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir, queue_limit=1) as node:
            engine = await node.engine()
            async with node.generate(request_of("gone")) as stream:
                await engine.hear_submit()
                stream.response.close()
            assert (await engine.hear_cancel()).id == "gone"
            async with node.generate(request_of("early")) as stream:
                (failed,) = await stream.rest()
                assert isinstance(failed, Failed)
                assert failed.type == "overloaded", "the engine has not let go of its place yet"
            await engine.say(finished("gone", "cancelled"))
            await assert_empty(node)
            async with node.generate(request_of("next")) as stream:
                assert (await engine.hear_submit()).id == "next"
                await engine.say(finished("next"))
                assert isinstance((await stream.rest())[-1], Done)

    run_scenario(scenario())


def test_a_caller_that_does_not_read_is_given_up(tmp_path: Path, stories_dir: Path) -> None:
    """Large events fill the socket's buffers; then they wait here, up to the limit."""
    top = Top(-1.0, [(token_id, -1.0) for token_id in range(40)])
    body = msgspec.msgpack.encode(request_of("slow", sampling=Sampling(logprobs=40)))

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            where = urlsplit(node.url)
            with socket.create_connection((where.hostname, where.port)) as caller:
                head = f"POST /generate HTTP/1.1\r\nHost: node\r\nAuthorization: Bearer {node.secret}\r\n"
                caller.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await engine.hear_submit()
                cancel = asyncio.create_task(engine.hear_cancel())
                said = 0
                while not cancel.done():
                    await engine.say(*[Generated("slow", 403, top)] * 256)
                    await asyncio.wait({cancel}, timeout=0.01)
                    said += 256
                assert (await cancel).id == "slow"
                assert said > EVENT_LIMIT
                await engine.say(finished("slow", "cancelled"))
                await assert_empty(node)

    run_scenario(scenario())


def test_the_engine_s_death_fails_what_is_in_flight_at_once(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with (
                node.generate(request_of("queued")) as queued,
                node.generate(request_of("admitted")) as admitted_only,
                node.generate(request_of("running")) as running,
            ):
                for _ in range(3):
                    await engine.hear_submit()
                await engine.say(admitted("admitted"), admitted("running"), *tokens("running", [403]))
                assert isinstance(await running.next(), Started)
                assert isinstance(await running.next(), Token)
                await engine.close()
                for stream, retryable in ((queued, True), (admitted_only, True), (running, False)):
                    failed = (await stream.rest())[-1]
                    assert isinstance(failed, Failed)
                    assert (failed.type, failed.retryable) == ("node_failed", retryable)
            record = await node.record()
            assert (record.state, record.running, record.queued) == ("warming", 0, 0)
            assert record.error
            again = await node.engine()
            async with node.generate(request_of("running")) as stream:
                await again.hear_submit()
                await again.say(finished("running"))
                assert isinstance((await stream.rest())[-1], Done)

    run_scenario(scenario())


def test_a_second_engine_replaces_the_first(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            first = await node.engine()
            async with node.generate(request_of("old")) as stream:
                await first.hear_submit()
                second = await ScriptedEngine.connect(node.socket)
                node.engines.append(second)
                (failed,) = await stream.rest()
                assert isinstance(failed, Failed)
                assert failed.type == "node_failed"
            assert await first.hung_up()
            await node.record_where(lambda r: r.state == "ready")
            async with node.generate(request_of("new")) as stream:
                assert (await second.hear_submit()).id == "new"
                await second.say(finished("new"))
                assert isinstance((await stream.rest())[-1], Done)

    run_scenario(scenario())


def test_a_deadline_that_the_engine_forgets_is_kept_here(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir, backstop=0.0) as node:
            engine = await node.engine()
            async with node.generate(request_of("late", timeout=0.05)) as stream:
                await engine.hear_submit()
                (failed,) = await stream.rest()
                assert isinstance(failed, Failed)
                assert failed.type == "timeout"
            assert (await engine.hear_cancel()).id == "late"
            await engine.say(*tokens("late", [403]), finished("late"))  # too late: dropped
            await assert_empty(node)

    run_scenario(scenario())


def test_half_a_character_is_shown_at_the_end_only(tmp_path: Path, stories_dir: Path) -> None:
    text = BaseText(stories_dir)
    ids = text.tokenizer.encode("\U0001f600", add_special_tokens=False).ids

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of()) as stream:
                await engine.hear_submit()
                await engine.say(*tokens("r1", ids[:-1]), finished("r1", "length"))
                *events, done = await stream.rest()
            assert isinstance(done, Done)
            assert "\ufffd" not in text_of(events)
            assert text_of(events) + done.text == text.tokenizer.decode(ids[:-1])
            assert "\ufffd" in done.text

    run_scenario(scenario())
