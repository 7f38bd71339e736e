"""Streams of events from nodes, one request after another on the same connection."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
from test_node_http import END, HEAD, Reader, Writer, chunk, connections, node, request_of

from benchmarks.stub_node import TIMING
from cluster.errors import ServiceError
from cluster.messages import Done, Event, GenerateRequest, Sampling, Started, Token, encode_event
from cluster.state import MemoryClusterState
from gateway.breaker import Breakers
from gateway.node_client import NodeClient
from gateway.scheduling.placement import Placed

REQUEST = GenerateRequest("inv_1-0", "b", "t", [1, 2], 2, Sampling(), 5.0)
EVENTS: list[Event] = [Started("n", "none"), Token("one", [1], 0), Done("length", 2, 1, 0, TIMING)]


async def serve(reader: Reader, writer: Writer) -> None:
    while True:
        await request_of(reader)
        writer.write(HEAD + b"".join(chunk(encode_event(event)) for event in EVENTS) + END)


@pytest.mark.parametrize("turns", range(6))
def test_a_request_given_up_at_its_end_fails_no_later_one(turns: int) -> None:
    """Whoever gives it up is heard some turns of the event loop later, when its connection serves another already."""

    async def main() -> None:
        loop, state = asyncio.get_running_loop(), MemoryClusterState(time.monotonic)
        async with node(serve) as (url, made), connections() as kept:
            breakers = Breakers(time.monotonic, lambda _: None)
            client = NodeClient(kept, state, silence=60.0, first_silence=60.0, breakers=breakers)
            placed = Placed("n", "1", url)
            revoked: asyncio.Future[ServiceError] = loop.create_future()
            found: list[Event] = []
            async with aclosing(client.stream(placed, REQUEST, revoked)) as events:
                async for event in events:
                    found.append(event)
                    if isinstance(event, Done):
                        revoked.set_result(ServiceError("not_found", "the function was deleted"))
                        for _ in range(turns):
                            await asyncio.sleep(0)
            async with aclosing(client.stream(placed, REQUEST, loop.create_future())) as events:
                found += [event async for event in events]
            assert (found, len(made)) == (2 * EVENTS, 1)

    asyncio.run(main())
