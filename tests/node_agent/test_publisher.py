"""What the gateway is told, and when."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest
from aiohttp import web

from cluster.messages import NodeRecord
from cluster.secret import authorization
from node_agent.api_desk import ACKNOWLEDGED_LIMIT, Desk
from node_agent.api_request import Limits
from node_agent.config import NodeConfig
from node_agent.publisher import Publisher
from tests.node_agent.scripted_engine import admitted, finished
from tests.node_agent.served_node import Gateway, gateway_server, node_config, request_of, run_scenario, served_node

LIMITS = Limits(vocab_size=512, max_position_embeddings=512)


def test_records_come_by_themselves_with_the_secret(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            records = [await node.gateway.records.get() for _ in range(3)]
            assert [r.seq for r in records] == sorted({r.seq for r in records})
            assert {r.url for r in records} == {node.url}
            assert node.gateway.authorizations == {authorization(node.secret)["authorization"]}

    run_scenario(scenario())


def test_a_request_is_acknowledged_until_the_gateway_took_it_in(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            node.gateway.status = 503
            async with node.generate(request_of("a")) as stream:
                await engine.hear_submit()
                for _ in range(2):
                    await node.gateway.record_where(lambda r: r.acknowledged == ["a"])
                node.gateway.status = 204
                await node.gateway.record_where(lambda r: r.acknowledged == ["a"])
                await node.gateway.record_where(lambda r: r.acknowledged == [])
                await engine.say(admitted("a"), finished("a"))
                await stream.rest()
            async with node.generate(request_of("refused", base="another")) as stream:
                await stream.rest()
            await node.gateway.record_where(lambda r: r.acknowledged == ["refused"])
            async with node.generate(request_of("unfit", max_tokens=0)) as stream:
                await stream.rest()
            await node.gateway.record_where(lambda r: r.acknowledged == ["unfit"])

    run_scenario(scenario())


def test_acknowledgements_are_bounded(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        desk = Desk(node_config(tmp_path, stories_dir, "http://127.0.0.1:1"), LIMITS)
        names = [f"r{index}" for index in range(ACKNOWLEDGED_LIMIT + 10)]
        for name in names:
            with pytest.raises(Exception, match="not ready"):
                desk.submit(request_of(name))
        told = desk.record().acknowledged
        assert told == names[10:]
        desk.forget_acknowledged(told[:5])
        assert desk.record().acknowledged == names[15:]

    run_scenario(scenario())


def test_a_gateway_that_is_away_is_tried_until_it_is_back(
    tmp_path: Path, stories_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gateway = Gateway()
    caplog.set_level(logging.INFO, "node_agent.publisher")

    async def scenario() -> None:
        desk = WatchedDesk(node_config(tmp_path, stories_dir, "unused"))
        publishing = asyncio.create_task(Publisher(desk, f"http://127.0.0.1:{port}", "secret").run())
        for _ in range(4):
            await desk.made.get()
        app = web.Application()
        app.router.add_post("/cluster/record", gateway.receive)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert (await gateway.records.get()).id == "n1"
        await gateway.records.get()
        publishing.cancel()
        await asyncio.wait({publishing})
        await runner.cleanup()

    run_scenario(scenario())
    assert [record.message for record in caplog.records] == ["gateway does not hear us", "gateway hears us"]


class WatchedDesk(Desk):
    """Says when a record is made."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config, LIMITS)
        self.made: asyncio.Queue[NodeRecord] = asyncio.Queue()

    def record(self) -> NodeRecord:
        record = super().record()
        self.made.put_nowait(record)
        return record


def test_a_change_is_told_at_once(tmp_path: Path, stories_dir: Path) -> None:
    """The publisher is started with an interval that never ends by itself."""
    gateway = Gateway()

    async def scenario() -> None:
        desk = Desk(node_config(tmp_path, stories_dir, "unused"), LIMITS)
        async with gateway_server(gateway) as url:
            publishing = asyncio.create_task(Publisher(desk, url, "secret", interval=3600.0).run())
            assert (await gateway.records.get()).state == "warming"
            desk.set_draining(True)
            assert (await gateway.records.get()).state == "draining"
            publishing.cancel()
            await asyncio.wait({publishing})

    run_scenario(scenario())
