"""What the gateway is told, and when."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from cluster.news import ABSENT_TIER, FULL_REPORT, Changes, NodeReport, Resident
from cluster.secret import authorization
from node_agent.api import publisher
from node_agent.api.publisher import Publisher
from node_agent.api.request import Limits
from node_agent.api.requests import RequestRegistry
from node_agent.config import NodeConfig
from tests.node_agent.scripted_engine import admitted, finished, stats
from tests.node_agent.served_node import Gateway, gateway_server, node_config, request_of, run_scenario, served_node
from tests.support.ports import free_port

LIMITS = Limits(vocab_size=512, max_position_embeddings=512)


def test_records_come_by_themselves_with_the_secret(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            records = [await node.gateway.records.get() for _ in range(3)]
            assert [r.seq for r in records] == sorted({r.seq for r in records})
            assert {r.url for r in records} == {node.url}
            assert node.gateway.authorizations == {authorization(node.secret)["authorization"]}

    run_scenario(scenario())


def test_a_request_is_received_by_its_number(tmp_path: Path, stories_dir: Path) -> None:
    """Whatever becomes of it: the place is not free for others for longer than the record takes."""

    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            async with node.generate(request_of("a", place=1000)) as stream:
                await engine.hear_submit()
                await node.gateway.record_where(lambda r: r.received.has(1000))
                await engine.say(admitted("a"), finished("a"))
                await stream.rest()
            for place, changed in ((1002, {"base": "another"}), (1001, {"max_tokens": 0})):
                async with node.generate(request_of(f"r{place}", place=place, **changed)) as stream:
                    await stream.rest()
                await node.gateway.record_where(lambda r, place=place: r.received.has(place))
            assert not (await node.record()).received.has(1003)

    run_scenario(scenario())


def held(*digests: str) -> list[Resident]:
    return [Resident(digest, "host", 1, 0) for digest in digests]


def test_what_changed_is_told_until_the_gateway_took_it_in(tmp_path: Path, stories_dir: Path) -> None:
    async def scenario() -> None:
        async with served_node(tmp_path, stories_dir) as node:
            engine = await node.engine()
            gateway = node.gateway
            await engine.say(stats(residents=held("x", "y"), kv_blocks_free=3))
            await gateway.record_where(lambda r: r.kv_blocks_free == 3)
            gateway.status = 503
            await engine.say(stats(residents=held("y", "z"), kv_blocks_free=4))
            await gateway.record_where(lambda r: r.kv_blocks_free == 4)
            await engine.say(stats(residents=held("y"), kv_blocks_free=5))
            await gateway.record_where(lambda r: r.kv_blocks_free == 5)
            gateway.news.clear()
            gateway.status = 204
            await gateway.record_where(lambda r: bool(gateway.news))
            told = gateway.news[0]
            assert told.facts is None and told.changes.since >= 0
            gone = {digest: Resident(digest, ABSENT_TIER, 0, 0) for digest in ("x", "z")}
            assert {resident.digest: resident for resident in told.changes.residents} == gone
            await gateway.record_where(lambda r: len(gateway.news) > 1)
            assert gateway.news[1].changes == Changes(told.changes.at, told.changes.at)
            gateway.status = 200  # it has lost all
            await gateway.record_where(lambda r: True)
            gateway.news.clear()
            gateway.status = 204
            await gateway.record_where(lambda r: bool(gateway.news))
            assert gateway.news[0].changes == Changes(FULL_REPORT, told.changes.at, held("y"))
            assert gateway.news[0].facts is not None

    run_scenario(scenario())


def test_a_gateway_that_is_away_is_tried_until_it_is_back(
    tmp_path: Path, stories_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    gateway = Gateway()
    caplog.set_level(logging.INFO, "node_agent.api.publisher")

    async def scenario() -> None:
        registry = WatchedRegistry(node_config(tmp_path, stories_dir, "unused"))
        publishing = asyncio.create_task(Publisher(registry, f"http://127.0.0.1:{port}", "secret", 0.02).run())
        for _ in range(4):
            await registry.made.get()
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


class WatchedRegistry(RequestRegistry):
    """Says when news are made."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config, LIMITS)
        self.made: asyncio.Queue[NodeReport] = asyncio.Queue()

    def news(self, known: int) -> NodeReport:
        news = super().news(known)
        self.made.put_nowait(news)
        return news


def test_news_come_at_their_interval_whatever_happens(tmp_path: Path, stories_dir: Path) -> None:
    gateway = Gateway()

    async def scenario() -> None:
        registry = RequestRegistry(node_config(tmp_path, stories_dir, "unused"), LIMITS)
        async with gateway_server(gateway) as url:
            publishing = asyncio.create_task(Publisher(registry, url, "secret", interval=0.2).run())
            begin = asyncio.get_running_loop().time()
            for index in range(3):
                for _ in range(50):
                    registry.draining = not registry.draining
                await gateway.records.get()
                assert asyncio.get_running_loop().time() - begin >= 0.2 * 0.99 * index
            publishing.cancel()
            await asyncio.wait({publishing})

    run_scenario(scenario())


def test_all_that_there_is_is_told_once_to_a_gateway_that_takes_long(
    tmp_path: Path, stories_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "POST_SECONDS", 0.05)
    monkeypatch.setattr(publisher, "WHOLE_SECONDS", 60.0)
    told: list[NodeReport] = []
    first, go_on, third = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def receive(request: web.Request) -> web.Response:
        told.append(msgspec.msgpack.decode(await request.read(), type=NodeReport))
        first.set()
        await go_on.wait()
        if len(told) > 2:
            third.set()
        return web.Response(status=204)

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/cluster/record", receive)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        registry = WatchedRegistry(node_config(tmp_path, stories_dir, "unused"))
        publishing = asyncio.create_task(Publisher(registry, f"http://127.0.0.1:{port}", "secret", 0.02).run())
        await first.wait()
        await asyncio.sleep(0.25)  # five times what other news wait
        assert [news.changes.since for news in told] == [FULL_REPORT]
        go_on.set()
        await third.wait()
        assert all(news.changes.since >= 0 for news in told[1:])
        publishing.cancel()
        await asyncio.wait({publishing})
        await runner.cleanup()

    run_scenario(scenario())
