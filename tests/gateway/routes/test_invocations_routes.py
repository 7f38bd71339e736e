"""Asynchronous calls over HTTP, against a node that echoes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from running_gateway import Running, until
from stub_node import Script, die_at_once, hang_before_first, refuse_for_good

import garnish
from adapters.local_store import LocalStore
from cluster.messages import Grammar
from garnish.cli.main import main
from gateway.calls.scale_from_zero import FirstNodeWait
from gateway.events import transitions
from gateway.events.event_store import EventStore
from gateway.events.messages import EventReply
from gateway.events.records import EventRecord, new_nonce
from gateway.jobs import poller


@pytest.fixture
def client(deployed: Running) -> httpx.Client:
    return deployed.client()


def submit(client: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "Once", "max_tokens": 3, "background": True, **fields}
    return client.post("/invoke/pirate", json=body, headers=headers)


def event_of(client: httpx.Client, event_id: str) -> EventReply:
    reply = client.get(f"/invocations/{event_id}")
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=EventReply)


def ended(client: httpx.Client, event_id: str) -> EventReply:
    until(lambda: event_of(client, event_id).ended is not None)
    return event_of(client, event_id)


def test_a_call_is_run_later(client: httpx.Client, deployed: Running) -> None:
    reply = submit(client)
    assert reply.status_code == 202, reply.text
    accepted = msgspec.json.decode(reply.content, type=EventReply)
    assert reply.headers["location"] == f"/invocations/{accepted.id}"
    assert (accepted.state, accepted.result) == ("queued", None)
    event = ended(client, accepted.id)
    assert event.state == "succeeded"
    assert event.result is not None
    assert (event.result.id, event.result.output.text) == (event.id, " t0 t1 t2")
    assert [attempt.error for attempt in event.attempts] == [None]
    asked = deployed.nodes[0].received[-1]
    assert (asked.slo_class, asked.ttft) == ("best_effort", None)


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"regex": "[a-c]+"}}, Grammar("regex", "[a-c]+")),
        ({"response_format": {"type": "json_object"}}, Grammar("json", '{"type": "object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}},
            Grammar("json", '{"const": 1}'),
        ),
    ],
)
def test_a_call_keeps_its_form(client: httpx.Client, deployed: Running, form: dict[str, Any], grammar: Grammar) -> None:
    assert ended(client, submit(client, **form).json()["id"]).state == "succeeded"
    assert deployed.nodes[0].received[-1].sampling.grammar == grammar


def test_a_form_that_cannot_be_kept_is_refused_at_once(client: httpx.Client, deployed: Running) -> None:
    before = client.get("/invocations").json()
    for form, param in [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ]:
        reply = submit(client, **form)
        assert (reply.status_code, reply.json()["error"]["param"]) == (422, param)
    assert client.get("/invocations").json() == before


def test_an_idempotency_key_names_one_event(client: httpx.Client, deployed: Running) -> None:
    key = {"idempotency-key": f"order {time.time_ns()}"}
    before = len(deployed.nodes[0].received)
    first, again = submit(client, key), submit(client, key)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    other = submit(client, key, prompt="Twice")
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict")
    ended(client, first.json()["id"])
    assert len(deployed.nodes[0].received) == before + 1
    assert client.get(f"/invocations/{first.json()['id']}", headers=as_other(deployed)).status_code == 404


def test_lists_are_by_state_and_function(client: httpx.Client) -> None:
    ids = {ended(client, submit(client).json()["id"]).id for _ in range(3)}
    listed: list[str] = []
    after: str | None = ""
    while after is not None:
        page = client.get(
            "/invocations", params={"state": "succeeded", "function": "pirate", "limit": 2, "after": after}
        )
        listed += [item["id"] for item in page.json()["invocations"]]
        after = page.json()["next"]
    assert ids <= set(listed)
    assert len(set(listed)) == len(listed)
    assert client.get("/invocations", params={"function": "nobody"}).json() == {"invocations": [], "next": None}
    assert client.get("/invocations", params={"after": "nonsense"}).status_code == 422
    assert client.get("/invocations", params={"after": "failed/../x"}).status_code == 422
    assert client.get("/invocations", params={"state": "lost"}).status_code == 422


def test_a_tenant_that_is_made_again_has_no_events(client: httpx.Client, deployed: Running) -> None:
    admin = deployed.client("admin", **{"x-garnish-tenant": "short"})
    assert admin.put("/tenants/short", json={}).status_code == 201
    secret = admin.post("/tenants/short/webhook-secrets")
    assert (secret.status_code, secret.json()["secret"][:6]) == (201, "whsec_")
    reply = admin.post("/invoke/stories260K", json={"prompt": "x", "max_tokens": 1, "background": True})
    event = ended(admin, reply.json()["id"])
    admin.delete("/tenants/short").raise_for_status()
    assert admin.put("/tenants/short", json={}).status_code == 201
    assert admin.get(f"/invocations/{event.id}").status_code == 404
    assert admin.get("/invocations").json()["invocations"] == []
    assert admin.delete(f"/tenants/short/webhook-secrets/{secret.json()['secret_id']}").status_code == 404


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"stream": True}, {}, "stream"),
        ({"on_success": {}}, {}, "on_success"),
        ({"on_failure": {"webhook": "http://a.example", "function": "f"}}, {}, "on_failure"),
        ({"on_success": {"webhook": "ftp://a.example"}}, {}, "on_success.webhook"),
        ({"on_success": {"webhook": "https://me:you@a.example"}}, {}, "on_success.webhook"),
        ({"on_success": {"webhook": "https://a.example"}}, {}, "on_success.webhook"),
        ({"on_success": {"function": "No"}}, {}, "on_success.function"),
        ({"prompt": None}, {}, "prompt"),
        ({"max_tokens": 10_000_000}, {}, "max_tokens"),
        ({"background": False, "on_success": {"function": "f"}}, {}, "on_success"),
        ({}, {"x-invocation-type": "Later"}, "x-invocation-type"),
        ({}, {"idempotency-key": "k" * 300}, "idempotency-key"),
    ],
)
def test_what_can_never_run_is_refused(
    client: httpx.Client, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    reply = submit(client, headers, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (422, param)


def test_the_header_asks_for_an_event_too(client: httpx.Client) -> None:
    reply = submit(client, {"x-invocation-type": "Event"}, background=False)
    assert reply.status_code == 202
    assert ended(client, reply.json()["id"]).state == "succeeded"


def test_a_failure_is_a_dead_letter_until_it_is_redriven(client: httpx.Client, deployed: Running) -> None:
    with scripted(deployed, refuse_for_good):
        event = ended(client, submit(client).json()["id"])
    assert (event.state, event.error.type, len(event.attempts)) == ("failed", "validation_failed", 1)
    letters = client.get("/dead-letters", params={"function": "pirate"}).json()["invocations"]
    assert event.id in [letter["id"] for letter in letters]
    reply = client.post(f"/dead-letters/{event.id}/redrive")
    assert (reply.status_code, reply.json()["state"]) == (202, "queued")
    assert ended(client, event.id).state == "succeeded"
    assert client.post(f"/dead-letters/{event.id}/redrive").status_code == 409
    with scripted(deployed, refuse_for_good):
        event = ended(client, submit(client).json()["id"])
    assert client.post("/dead-letters/redrive", params={"function": "pirate"}).json()["redriven"] >= 1
    assert ended(client, event.id).state == "succeeded"


def test_a_lost_node_is_tried_again(client: httpx.Client, deployed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "FIRST_PAUSE_S", 0.05)
    client.patch("/functions/pirate", json={"retries": 1}).raise_for_status()
    with scripted(deployed, die_at_once):
        event = ended(client, submit(client).json()["id"])
    assert event.state == "failed"
    assert [attempt.error.type for attempt in event.attempts if attempt.error] == ["node_failed"] * 2
    client.patch("/functions/pirate", json={"retries": None}).raise_for_status()


def test_cancelling_ends_what_runs(client: httpx.Client, deployed: Running) -> None:
    node = deployed.nodes[0]
    with scripted(deployed, hang_before_first):
        node.disconnected.clear()
        event_id = submit(client).json()["id"]
        until(lambda: event_of(client, event_id).state == "running" and node.began.is_set())
        assert client.delete(f"/invocations/{event_id}").json()["state"] == "cancelled"
        assert node.disconnected.wait(30)
        node.go_on.set()
    node.go_on.clear()
    assert event_of(client, event_id).state == "cancelled"
    assert client.delete(f"/invocations/{event_id}").status_code == 200
    finished = ended(client, submit(client).json()["id"]).id
    assert client.delete(f"/invocations/{finished}").status_code == 409


def test_a_function_is_told(client: httpx.Client, deployed: Running) -> None:
    event = ended(client, submit(client, on_success={"function": "pirate:latest"}).json()["id"])
    until(lambda: event_of(client, event.id).delivery.state == "delivered")
    assert event_of(client, event.id).delivery.attempts == 1

    def led_to() -> list[dict[str, Any]]:
        found = client.get("/invocations", params={"state": "succeeded", "limit": 100}).json()["invocations"]
        return [item for item in found if item["qualifier"] == "latest"]

    until(lambda: len(led_to()) == 1)


def test_a_function_that_is_told_runs_by_its_own_policy(
    client: httpx.Client, deployed: Running, pirate: dict[str, Any]
) -> None:
    """Its destination is told in turn, and a loop of two functions ends."""
    for name in ("second", "third"):
        client.post(f"/deploy/{name}", files=pirate).raise_for_status()
    for name, policy in (("second", {"retries": 0, "max_age": 60, "on_success": {"function": "third"}}),
                         ("third", {"on_success": {"function": "second"}})):  # fmt: skip
        client.patch(f"/functions/{name}", json=policy).raise_for_status()
    submit(client, on_success={"function": "second"}).raise_for_status()

    def led_to(name: str) -> list[EventReply]:
        query = {"state": "succeeded", "limit": 100, "function": name}
        items = client.get("/invocations", params=query).json()["invocations"]
        return [event_of(client, item["id"]) for item in items]

    until(
        lambda: any(event.delivery and event.delivery.state == "failed" for event in led_to("third") + led_to("second"))
    )
    second, third = led_to("second"), led_to("third")
    assert len(second) + len(third) == 8
    assert {(event.retries, event.deadline - event.created) for event in second} == {(0, 60.0)}
    assert {(event.retries, event.deadline - event.created) for event in third} == {(2, 6 * 3600.0)}


def test_others_of_the_tenant_find_a_place_beside_asynchronous_calls(deployed: Running) -> None:
    admin = deployed.client("admin", **{"x-garnish-tenant": "narrow"})
    admin.put("/tenants/narrow", json={"limits": {"concurrent": 2}}).raise_for_status()
    node, call = deployed.nodes[0], {"prompt": "x", "max_tokens": 1}
    before = len(node.received)
    with scripted(deployed, hang_before_first):
        ids = [admin.post("/invoke/stories260K", json=call | {"background": True}).json()["id"] for _ in range(2)]
        until(lambda: len(node.received) == before + 2 or any(event_of(admin, each).error for each in ids))
        with ThreadPoolExecutor(1) as pool:
            waited_for = pool.submit(admin.post, "/invoke/stories260K", json=call)
            until(lambda: len(node.received) == before + 2 or waited_for.done())
            node.go_on.set()
            assert waited_for.result().status_code == 200
        assert [ended(admin, each).state for each in ids] == ["succeeded"] * 2
    node.go_on.clear()


def test_no_attempt_is_used_up_while_no_node_serves(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "BACKOFF_S", 0.05)
    applies, asked = FirstNodeWait.should_wait, 0

    async def noted(hold: FirstNodeWait, *without: Collection[str]) -> bool:
        nonlocal asked
        asked += 1
        return await applies(hold, *without)

    monkeypatch.setattr(FirstNodeWait, "should_wait", noted)  # which workers ask before they begin a call
    empty = start()
    client = empty.client()
    reply = client.post("/invoke/stories260K", json={"prompt": "x", "max_tokens": 1, "background": True})
    until(lambda: asked >= 3)
    waits = event_of(client, reply.json()["id"])
    assert (waits.state, waits.attempts) == ("queued", [])
    empty.node()
    event = ended(client, waits.id)
    assert (event.state, len(event.attempts)) == ("succeeded", 1)


def test_a_call_with_fields_of_a_newer_release_waits_for_its_workers(client: httpx.Client, deployed: Running) -> None:
    """During an upgrade, or after its rollback: that this worker can't run it is no attempt."""
    store = LocalStore(Path(deployed.config.registry))
    now = store.now()
    event = EventRecord(
        id="inv_newer", tenant="acme", function="pirate", request={"prompt": "x", "newer": 1}, created=now, changed=now,
        due=now, deadline=now + 3600, nonce=new_nonce(),
    )  # fmt: skip
    assert EventStore(store).add(event) is not None
    submit(client).raise_for_status()  # for which this worker looks at what is queued
    until(lambda: event_of(client, event.id).error is not None)
    waits = event_of(client, event.id)
    assert (waits.state, waits.attempts, waits.error.type) == ("queued", [], "unavailable")
    assert client.delete(f"/invocations/{event.id}").status_code == 200


def test_the_clients(deployed: Running) -> None:
    key = deployed.keys["acme"]
    with garnish.Client(deployed.url, key) as client:
        event = client.submit("pirate", "Once", max_tokens=2, idempotency_key=f"client {time.time_ns()}")
        until(lambda: client.event(event.id).ended is not None)
        assert event.id in [item.id for item in client.events("pirate", "succeeded", 100).invocations]
        assert client.redrive_all("nobody").redriven == 0

    async def talk() -> None:
        async with garnish.AsyncClient(deployed.url, key) as client:
            again = await client.event(event.id)
            assert again.result is not None
            with pytest.raises(garnish.GarnishError, match="has ended"):
                await client.cancel(event.id)
            assert (await client.dead_letters("nobody")).invocations == []

    asyncio.run(talk())


def test_the_command_line(deployed: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("GARNISH_URL", deployed.url)
    monkeypatch.setenv("GARNISH_API_KEY", deployed.keys["acme"])

    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert ended.value.code == 0
        return str(capsys.readouterr().out)

    event_id = command("invoke", "pirate", "Once", "--max-tokens", "2", "--async").strip()
    until(lambda: "succeeded" in command("events", "get", event_id))
    assert command("events", "get", event_id).endswith(" t0 t1\n")
    assert event_id in command("events", "list", "--function", "pirate", "--in", "succeeded", "--limit", "100")
    assert "0 queued again" in command("events", "redrive", "--all", "--function", "nobody")


def as_other(running: Running) -> dict[str, str]:
    return {"authorization": f"Bearer {running.keys['other']}"}


@contextmanager
def scripted(running: Running, script: Script) -> Iterator[None]:
    """The module's node behaves otherwise for a while."""
    node = running.nodes[0]
    node.began.clear()
    usual, node.script = node.script, script
    try:
        yield
    finally:
        node.script = usual
