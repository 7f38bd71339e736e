"""Webhooks: verified by the `openai` client, and kept from hosts and addresses that are not allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from event_world import RESULT, World, new_event, no_policy, open_events, places, webhooks_to
from running_gateway import Running, until
from served_app import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from adapters.destinations import Destination
from adapters.errors import Conflict, NotFound
from adapters.local_store import LocalStore
from adapters.tenants import Tenants
from gateway.events import webhooks
from gateway.events.deliveries import MAX_DEPTH, Deliveries
from gateway.events.event_store import EventStore
from gateway.events.records import EventRecord, new_nonce
from gateway.events.transitions import claimed, succeeded
from gateway.events.webhook_secrets import WebhookSecret, add_secret, end_secret, read_secrets
from gateway.webhook_hosts import NotAllowed, WebhookHosts, parse_webhook_hosts

LOOPBACK = ("127.0.0.0/8", "localhost")


class Receiver:
    """What has come to it; `answers` are its next statuses, then 204."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.amid: Callable[[], None] = lambda: None
        """Called before it answers."""

    async def hook(self, request: Request) -> Response:
        self.received.append((dict(request.headers), await request.body()))
        self.amid()
        return Response(status_code=self.answers.pop(0) if self.answers else 204)

    async def moved(self, request: Request) -> Response:
        return RedirectResponse(str(request.url_for("hook")))


@pytest.fixture(scope="module")
def receiver_url() -> Iterator[tuple[Receiver, str]]:
    receiver = Receiver()
    app = Starlette(
        routes=[
            Route("/hook", receiver.hook, methods=["POST"], name="hook"),
            Route("/moved", receiver.moved, methods=["POST"]),
        ]
    )
    with served(app) as url:
        yield receiver, url


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "registry")


def deliver(world: World, event: EventRecord, allowed: Sequence[str] = LOOPBACK) -> EventRecord:
    """Stores an event that has ended, tries its delivery once, and returns it."""

    async def hosts_of(tenant: str) -> WebhookHosts:
        assert tenant == event.tenant
        return parse_webhook_hosts(allowed)

    async def work() -> EventRecord:
        events = open_events(world.store())
        added = await events.threads.write(events.store.add, event)
        await Deliveries(events, webhooks_to(hosts_of), no_policy, places(16, 4)).deliver(added)
        return await events.get(event.tenant, event.id)

    return asyncio.run(work())


def ended_event(world: World, url: str, number: int = 1) -> EventRecord:
    now = world.store().now()
    event = new_event(number, now, on_success=Destination(webhook=url))
    return succeeded(claimed(event, "w", now), RESULT, now)


@pytest.fixture
def secret(world: World) -> WebhookSecret:
    tenants = Tenants(LocalStore(world.folder))
    tenants.put("acme")
    return add_secret(tenants, "acme")


def test_openai_verifies_with_either_secret(
    world: World, secret: WebhookSecret, receiver_url: tuple[Receiver, str]
) -> None:
    receiver, url = receiver_url
    second = add_secret(Tenants(LocalStore(world.folder)), "acme")
    event = deliver(world, ended_event(world, f"{url}/hook"))
    assert event.delivery is not None
    assert (event.delivery.state, event.delivery.attempts) == ("delivered", 1)
    headers, body = receiver.received[-1]
    for each in (secret, second):
        client = openai.OpenAI(api_key="-", webhook_secret=each.secret)
        told: Any = client.webhooks.unwrap(body, headers)
        assert told.type == "invocation.succeeded"
    data = msgspec.json.decode(body)["data"]
    assert (data["id"], data["result"]["output"]["text"]) == (event.id, "Arr")
    with pytest.raises(openai.InvalidWebhookSignatureError):
        openai.OpenAI(api_key="-", webhook_secret=secret.secret).webhooks.unwrap(body + b" ", headers)


def test_a_refusal_is_tried_again_for_a_day(
    world: World, secret: WebhookSecret, receiver_url: tuple[Receiver, str]
) -> None:
    receiver, url = receiver_url
    receiver.answers = [500]
    event = deliver(world, ended_event(world, f"{url}/hook"))
    assert event.delivery is not None
    assert (event.delivery.state, event.delivery.problem) == ("pending", "the receiver answered 500")
    assert 3 < event.delivery.due - event.changed < 10
    old = msgspec.structs.replace(event.delivery, began=event.changed - 86400, nonce=new_nonce())
    receiver.answers = [500]
    late = deliver(world, msgspec.structs.replace(event, id="inv_0002", delivery=old, nonce=new_nonce()))
    assert late.delivery is not None
    assert late.delivery.state == "failed"


def test_nobody_else_tries_while_a_receiver_takes_its_time(
    world: World, secret: WebhookSecret, receiver_url: tuple[Receiver, str]
) -> None:
    receiver, url = receiver_url
    left: list[float] = []

    def look() -> None:
        store = world.store()
        [marker] = EventStore(store).list_markers("events/delivering/")
        left.append(marker.time - store.now())

    receiver.amid = look
    try:
        event = deliver(world, ended_event(world, f"{url}/hook"))
    finally:
        receiver.amid = lambda: None
    assert event.delivery is not None
    assert event.delivery.state == "delivered"
    assert left[0] > webhooks.SEND_S, "for as long as the try may last"


def test_a_loop_of_functions_is_given_up_at_once(world: World) -> None:
    now = world.store().now()
    event = new_event(1, now, on_success=Destination(function="pirate"), depth=MAX_DEPTH)
    told = deliver(world, succeeded(claimed(event, "w", now), RESULT, now)).delivery
    assert told is not None
    assert (told.state, told.attempts, told.problem) == (
        "failed",
        1,
        "the event is the last of a chain of 8, the maximum",
    )


@pytest.mark.parametrize(
    ("path", "allowed", "problem"),
    [
        ("/moved", LOOPBACK, "the receiver answered 307"),
        ("/hook", ("hooks.acme.example",), "the webhook's host has an address that is not public"),
    ],
)
def test_what_is_not_followed_or_sent(
    world: World,
    secret: WebhookSecret,
    receiver_url: tuple[Receiver, str],
    path: str,
    allowed: Sequence[str],
    problem: str,
) -> None:
    receiver, url = receiver_url
    before = len(receiver.received)
    event = deliver(world, ended_event(world, url + path), allowed)
    assert event.delivery is not None
    assert event.delivery.problem == problem
    assert len(receiver.received) == before


def test_a_name_that_leads_to_a_private_address_is_refused(
    world: World, secret: WebhookSecret, receiver_url: tuple[Receiver, str]
) -> None:
    receiver, url = receiver_url
    before = len(receiver.received)
    named = url.replace("127.0.0.1", "localhost")
    event = deliver(world, ended_event(world, f"{named}/hook"), ("localhost",))
    assert event.delivery is not None
    assert event.delivery.problem == "the webhook's host has an address that is not public"
    assert len(receiver.received) == before
    assert deliver(world, ended_event(world, f"{named}/hook", 2), ("localhost", "127.0.0.1", "::1")).delivery.state == (
        "delivered"
    )


def test_a_tenant_s_own_hosts(deployed: Running, receiver_url: tuple[Receiver, str]) -> None:
    """Beside those of the service, which has none, and for this tenant alone."""
    receiver, url = receiver_url
    call = {"prompt": "x", "max_tokens": 1, "background": True, "on_success": {"webhook": f"{url}/hook"}}
    before = len(receiver.received)
    for tenant, hosts in (("hooked", ["127.0.0.1", "*.acme.example"]), ("closed", [])):
        admin = deployed.client("admin", **{"x-garnish-tenant": tenant})
        assert admin.put(f"/tenants/{tenant}", json={"webhook_hosts": hosts}).json()["webhook_hosts"] == hosts
        assert admin.post(f"/tenants/{tenant}/webhook-secrets").status_code == 201
        reply = admin.post("/invoke/stories260K", json=call)
        if not hosts:
            assert (reply.status_code, reply.json()["error"]["param"]) == (422, "on_success.webhook")
            continue
        assert reply.status_code == 202, reply.text
        where = f"/invocations/{reply.json()['id']}"
        until(
            lambda where=where, client=admin: (client.get(where).json()["delivery"] or {}).get("state") == "delivered"
        )
    assert len(receiver.received) == before + 1
    admin.put("/tenants/hooked", json={}).raise_for_status()
    acting = {"x-garnish-tenant": "hooked"}
    assert admin.post("/invoke/stories260K", json=call, headers=acting).status_code == 422


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fe80::1", "fd00::1", "0.0.0.0", "224.0.0.1",
     "100.64.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a00:1::1",
     "::7f00:1", "2001:0:a00:1::1", "fec0::1", "5f00::1", "ff0e::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    with pytest.raises(NotAllowed):
        parse_webhook_hosts(["hooks.acme.example"]).check_address(ip_address(address))
    parse_webhook_hosts(["0.0.0.0/0", "::/0"]).check_address(ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
)
def test_addresses_that_are_public(address: str) -> None:
    parse_webhook_hosts(["hooks.acme.example"]).check_address(ip_address(address))


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://hooks.acme.example/x", True),
        ("https://HOOKS.acme.example./x", True),
        ("https://a.b.wide.example", True),
        ("https://wide.example", False),
        ("https://evilhooks.acme.example", False),
        ("https://hooks.acme.example.evil.example", False),
        ("https://8.8.8.8", False),
        ("https://10.1.0.7", True),
        ("https://2130706433", False),
        ("https://[::ffff:127.0.0.1]", False),
    ],
)
def test_hosts(url: str, allowed: bool) -> None:
    hosts = parse_webhook_hosts(["hooks.acme.example", "*.wide.example", "10.1.0.0/16"])
    if allowed:
        hosts.check_url(url)
    else:
        with pytest.raises(NotAllowed):
            hosts.check_url(url)


def test_two_secrets_are_valid_at_most(world: World, secret: WebhookSecret) -> None:
    tenants = Tenants(LocalStore(world.folder))
    second = add_secret(tenants, "acme")
    with pytest.raises(Conflict):
        add_secret(tenants, "acme")
    end_secret(tenants, "acme", secret.secret_id)
    assert read_secrets(tenants.store, "acme") == (second,)
    with pytest.raises(NotFound):
        end_secret(tenants, "acme", secret.secret_id)
    with pytest.raises(NotFound):
        add_secret(tenants, "nobody")
