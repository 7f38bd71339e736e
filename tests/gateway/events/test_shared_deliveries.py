"""Deliveries of several tenants in one worker: receivers that hang delay nobody but their own tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic

import pytest
from event_world import RESULT, World, always, new_event, no_policy, open_events, places, webhooks_to
from test_webhooks import LOOPBACK

from adapters.destinations import Destination
from adapters.tenants import Tenants
from gateway.events import webhooks
from gateway.events.deliveries import Deliveries
from gateway.events.records import EventRecord
from gateway.events.transitions import claimed, succeeded
from gateway.events.webhook_secrets import add_secret
from gateway.events.worker import Worker
from gateway.webhook_hosts import WebhookHosts, parse_webhook_hosts

HANGING = 40


async def hosts_of(_tenant: str) -> WebhookHosts:
    return parse_webhook_hosts(LOOPBACK)


def ended(world: World, number: int, tenant: str, to: Destination) -> EventRecord:
    now = world.store().now()
    return succeeded(claimed(new_event(number, now, tenant, on_success=to), "w", now), RESULT, now)


@pytest.mark.parametrize("attackers", [1, 3])
def test_hanging_webhooks_delay_neither_webhooks_nor_destinations_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attackers: int
) -> None:
    """Each attacker's receivers take the connection and never answer."""
    monkeypatch.setattr(webhooks, "SEND_S", 600.0)  # so that whoever waits for them is seen
    world, received = World(tmp_path / "registry"), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        received.set()
        writer.close()

    async def hang(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        hung.append(1)
        await asyncio.Event().wait()

    hung: list[int] = []

    async def main() -> float:
        store = world.store()
        tenants, events = Tenants(store), open_events(store)
        for tenant in ("good", *(f"bad{number}" for number in range(attackers))):
            tenants.put(tenant)
            add_secret(tenants, tenant)
        async with (
            await asyncio.start_server(hang, "127.0.0.1", 0) as bad,
            await asyncio.start_server(answer, "127.0.0.1", 0) as good,
        ):
            bad_url, good_url = (f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}/hook" for each in (bad, good))
            number = 0
            for attacker in range(attackers):
                for _ in range(HANGING):
                    number += 1
                    store_event = ended(world, number, f"bad{attacker}", Destination(webhook=bad_url))
                    await events.threads.write(events.store.add, store_event)
            deliveries = Deliveries(events, webhooks_to(hosts_of), no_policy, places(16, 4))

            async def execute(event: EventRecord) -> object:
                executed.set()
                await asyncio.Event().wait()
                raise AssertionError

            executed = asyncio.Event()
            worker = Worker(events, execute, deliveries, always, places(4, 1))  # type: ignore[arg-type]
            async with worker.running(), asyncio.timeout(60):
                while len(hung) < 4 * attackers:  # noqa: ASYNC110 - the connections come one by one
                    await asyncio.sleep(0.01)
                began = monotonic()
                for to in (Destination(webhook=good_url), Destination(function="pirate")):
                    number += 1
                    await events.threads.write(events.store.add, ended(world, number, "good", to))
                events.wake()
                await received.wait()
                await executed.wait()
                return monotonic() - began

    monkeypatch.setattr("gateway.events.worker.STOP_S", 0.1)
    assert asyncio.run(main()) < 15.0
    assert len(hung) == 4 * attackers, "and no attacker has more places"
