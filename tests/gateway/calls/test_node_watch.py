"""Nodes whose records stop: their streams end when their bytes have stopped, too, and only then."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, aclosing
from types import SimpleNamespace

import msgspec
import pytest
from raw_node import (
    END,
    HEAD,
    REQUEST,
    TIMING,
    Reader,
    Writer,
    ask,
    chunk,
    in_vain,
    node,
    node_client,
    record,
    recorded,
    request_of,
    run,
)

from cluster.errors import ServiceError
from cluster.messages import Done, Event, Started, Token, encode_event
from gateway.calls import node_watch
from gateway.calls.node_watch import NodeFailure, NodeWatches
from gateway.scheduling.route import Route

SILENCE = 1.0
STREAMS = 5000


class Clock:
    """Stands still but for the test."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the watch, which looks again and again meanwhile."""
    made = Clock()
    monkeypatch.setattr(node_watch, "time", SimpleNamespace(monotonic=made))
    monkeypatch.setattr(node_watch, "TICK_S", 0.001)
    return made


async def serve_one_token(reader: Reader, writer: Writer) -> None:
    await request_of(reader)
    writer.write(HEAD + chunk(encode_event(Started("n", "none"))) + chunk(encode_event(Token("one", [1], 0))))
    await reader.read()


async def until_one_token(*told: list[Event]) -> None:
    while any(len(events) < 2 for events in told):  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_a_stream_whose_bytes_flow_outlives_the_records(clock: Clock) -> None:
    """They come slower than its own tokens alone would have to: another stream's bytes of that node count, too."""
    told: list[Event] = [Token(f" {index}", [index], index) for index in range(20)]

    async def main() -> None:
        state, both = await recorded(("n", "1"), clock=clock), asyncio.Barrier(2)

        async def serve(reader: Reader, writer: Writer) -> None:
            _, body = await request_of(reader)
            quick = b"quick" in body
            writer.write(HEAD + chunk(encode_event(Started("n", "none"))) + chunk(encode_event(told[0])))
            await both.wait()
            for event in told[1:]:
                if quick:
                    clock.now += 0.15 * SILENCE
                    await state.looked()
                    writer.write(chunk(encode_event(event)))
                    await state.looked()
            await both.wait()
            writer.write(chunk(encode_event(Done("length", 2, 20, 0, TIMING))) + END)

        began = clock.now
        async with node(serve) as (url, _), node_client(state, silence=SILENCE) as client:
            quick = msgspec.structs.replace(REQUEST, id="quick")
            found, other = await asyncio.gather(ask(client, url, quick), ask(client, url))
        assert found[1:-1] == told and [type(event) for event in other] == [Started, Token, Done]
        assert clock.now - began > 2 * SILENCE

    run(main)


def test_all_streams_end_when_records_and_bytes_stop(clock: Clock) -> None:
    """And end together."""

    async def main() -> None:
        state = await recorded(("n", "1"), clock=clock)
        told: list[list[Event]] = [[] for _ in range(50)]

        async def fail(url: str, events: list[Event]) -> None:
            with pytest.raises(NodeFailure, match="does not answer") as failure:
                await ask(client, url, into=events)
            assert failure.value.retryable

        async with node(serve_one_token) as (url, made), node_client(state, silence=SILENCE) as client:
            failing = [asyncio.create_task(fail(url, events)) for events in told]
            await until_one_token(*told)
            clock.now += 0.99 * SILENCE
            await state.looked()
            assert not any(each.done() for each in failing)
            clock.now += 0.02 * SILENCE
            await asyncio.gather(*failing)
            assert len(made) == 50

    run(main)


def test_records_alone_are_life(clock: Clock) -> None:
    """As of a node that takes long over a token. So are those of another process no life: they have another epoch."""

    async def main() -> None:
        state, told = await recorded(("n", "1"), clock=clock), list[Event]()
        async with node(serve_one_token) as (url, _), node_client(state, silence=SILENCE) as client:
            asking = asyncio.create_task(ask(client, url, into=told))
            await until_one_token(told)
            for seq in range(2, 22):
                await state.publish(record("n", "1", seq))
                clock.now += 0.1 * SILENCE
                await state.looked(asking.done)
                assert not asking.done()
            for seq in range(1, 100):
                await state.publish(record("n", "2", seq))
                clock.now += 0.1 * SILENCE
                await state.looked(asking.done)
                if asking.done():
                    break
            with pytest.raises(NodeFailure, match="does not answer"):
                await asking

    run(main)


def test_thousands_of_streams_cost_a_task_and_a_timer_per_node() -> None:
    async def main() -> None:
        nodes = [(f"n{number}", "1") for number in range(3)]
        watches = NodeWatches(await recorded(*nodes), silence=600.0, first_silence=600.0, ask=in_vain)
        loop = asyncio.get_running_loop()
        before = len(asyncio.all_tasks()), len(loop._scheduled)  # type: ignore[attr-defined]
        with ExitStack() as stack:
            for number in range(STREAMS):
                route = Route(*nodes[number % 3], "http://127.0.0.1:1")
                stack.enter_context(watches.watched(route, time.monotonic() + 60.0))
            await asyncio.sleep(0)
            after = len(asyncio.all_tasks()), len(loop._scheduled)  # type: ignore[attr-defined]
            assert (after[0] - before[0], after[1] - before[1]) == (3, 3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == before[0], "nothing is left of it"

    asyncio.run(main())


def test_a_deadline_that_the_node_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.calls.node_client.DEADLINE_SLACK", -59.9)
    monkeypatch.setattr(node_watch, "TICK_S", 0.01)

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD)
        await reader.read()

    async def main() -> None:
        async with node(serve) as (url, _), node_client() as client:
            revoked: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
            with pytest.raises(ServiceError, match="deadline"):
                async with aclosing(client.stream(Route("n", "1", url), REQUEST, revoked)) as events:
                    await anext(events)

    run(main)
