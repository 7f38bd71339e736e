"""Nodes whose records stop: their streams end when their bytes have stopped, too, and only then."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, aclosing

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
    node,
    node_client,
    record,
    recorded,
    request_of,
    run,
)

from cluster.errors import ServiceError
from cluster.messages import Done, Event, Started, Token, encode_event
from gateway.calls.node_watch import NodeFailure, NodeWatches
from gateway.scheduling.placement import Placed

SILENCE = 1.0
STREAMS = 5000


def test_a_stream_whose_bytes_flow_outlives_the_records() -> None:
    """They come slower than its own tokens alone would have to: another stream's bytes of that node count, too."""
    told: list[Event] = [Token(f" {index}", [index], index) for index in range(20)]

    async def serve(reader: Reader, writer: Writer) -> None:
        _, body = await request_of(reader)
        quick = b"quick" in body
        writer.write(HEAD + chunk(encode_event(Started("n", "none"))) + chunk(encode_event(told[0])))
        for event in told[1:]:
            await asyncio.sleep(0.15)
            if quick:
                writer.write(chunk(encode_event(event)))
        writer.write(chunk(encode_event(Done("length", 2, 20, 0, TIMING))) + END)

    async def main() -> None:
        state = await recorded(("n", "1"))
        began = time.monotonic()
        async with node(serve) as (url, _), node_client(state, silence=SILENCE) as client:
            quick = msgspec.structs.replace(REQUEST, id="quick")
            found, other = await asyncio.gather(ask(client, url, quick), ask(client, url))
        assert found[1:-1] == told and [type(event) for event in other] == [Started, Token, Done]
        assert time.monotonic() - began > 2 * SILENCE

    run(main)


def test_all_streams_end_when_records_and_bytes_stop() -> None:
    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(encode_event(Started("n", "none"))) + chunk(encode_event(Token("one", [1], 0))))
        await reader.read()

    async def main() -> None:
        state = await recorded(("n", "1"))
        ended: list[float] = []

        async def fail(url: str) -> None:
            with pytest.raises(NodeFailure, match="silent") as failure:
                await ask(client, url)
            assert failure.value.retryable
            ended.append(time.monotonic())

        async with node(serve) as (url, made), node_client(state, silence=SILENCE) as client:
            await asyncio.gather(*(fail(url) for _ in range(50)))
            assert len(made) == 50
        assert max(ended) - min(ended) < SILENCE, "they end together"

    run(main)


def test_records_alone_are_life() -> None:
    """As of a node that takes long over a token. So are those of another process no life: they have another epoch."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(encode_event(Started("n", "none"))) + chunk(encode_event(Token("one", [1], 0))))
        await reader.read()

    async def main() -> None:
        state = await recorded(("n", "1"))
        async with node(serve) as (url, _), node_client(state, silence=SILENCE) as client:
            asking = asyncio.create_task(ask(client, url))
            for seq in range(2, 22):
                await state.publish(record("n", "1", seq))
                await asyncio.sleep(0.1)
                assert not asking.done()
            for seq in range(1, 100):
                await state.publish(record("n", "2", seq))
                await asyncio.sleep(0.1)
                if asking.done():
                    break
            with pytest.raises(NodeFailure, match="silent"):
                await asking

    run(main)


def test_thousands_of_streams_cost_a_task_and_a_timer_per_node() -> None:
    async def main() -> None:
        nodes = [(f"n{number}", "1") for number in range(3)]
        watches = NodeWatches(await recorded(*nodes), silence=600.0, first_silence=600.0)
        loop = asyncio.get_running_loop()
        before = len(asyncio.all_tasks()), len(loop._scheduled)  # type: ignore[attr-defined]
        with ExitStack() as stack:
            for number in range(STREAMS):
                place = Placed(*nodes[number % 3], "http://127.0.0.1:1")
                stack.enter_context(watches.watched(place, time.monotonic() + 60.0))
            await asyncio.sleep(0)
            after = len(asyncio.all_tasks()), len(loop._scheduled)  # type: ignore[attr-defined]
            assert (after[0] - before[0], after[1] - before[1]) == (3, 3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == before[0], "nothing is left of it"

    asyncio.run(main())


def test_a_deadline_that_the_node_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.calls.node_client.DEADLINE_SLACK", -59.9)

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD)
        await reader.read()

    async def main() -> None:
        async with node(serve) as (url, _), node_client() as client:
            revoked: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
            with pytest.raises(ServiceError, match="deadline"):
                async with aclosing(client.stream(Placed("n", "1", url), REQUEST, revoked)) as events:
                    await anext(events)

    run(main)
