"""Calls of split and moving aliases: their shares, their sessions, and never a version that is not the one named."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from running_gateway import Running, upload
from stub_node import Cut, StubNode, done, token

from cluster.messages import Event, GenerateRequest, Started

CALLS = 600
CALL = {"prompt": "x", "max_tokens": 1}


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@pytest.fixture
def split(gateway: Running, stories_adapters: dict[str, Path]) -> Running:
    """`f` has two versions, and `prod` gives nine of ten calls to the first."""
    client = gateway.client()
    for name in ("pirate", "dragon"):
        assert client.post("/deploy/f", files=upload(stories_adapters[name])).status_code == 201
    weights = {"weights": {"1": 0.9, "2": 0.1}}
    assert client.put("/functions/f/aliases/prod", json=weights).status_code == 200
    return gateway


def digests(client: httpx.Client) -> dict[int, str]:
    return {entry["version"]: entry["digest"] for entry in client.get("/functions/f").json()["versions"]}


async def post_all(
    running: Running, headers: list[dict[str, str]], path: str = "/invoke/f:prod"
) -> list[httpx.Response]:
    key = {"authorization": f"Bearer {running.keys['acme']}"}
    body = CALL if path.startswith("/invoke") else CALL | {"model": "f:prod"}
    at_once = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=running.url, headers=key, timeout=60, verify=False) as client:

        async def call(own: dict[str, str]) -> httpx.Response:
            async with at_once:
                return await client.post(path, json=body, headers=own)

        return await asyncio.gather(*(call(own) for own in headers))


def test_a_canary_gets_its_share_of_the_calls(split: Running) -> None:
    known = digests(split.client())
    replies = asyncio.run(post_all(split, [{"x-request-id": uuid.uuid4().hex} for _ in range(CALLS)]))
    assert {reply.status_code for reply in replies} == {200}
    assert all(reply.json()["digest"] == known[reply.json()["version"]] for reply in replies)
    (node,) = split.nodes
    ran = [asked.adapter.digest for asked in node.received if asked.adapter]
    canary = sum(reply.headers["x-garnish-version"] == "2" for reply in replies)
    assert ran.count(known[2]) == canary
    assert abs(canary - CALLS * 0.1) <= 6 * math.sqrt(CALLS * 0.1 * 0.9)


def test_the_same_id_or_session_gets_the_same_side(split: Running) -> None:
    ids = [{"x-request-id": f"id-{number}"} for number in range(40)]
    sessions = [{"x-garnish-session": f"session {number}", "x-request-id": uuid.uuid4().hex} for number in range(40)]

    def versions(headers: list[dict[str, str]], path: str = "/invoke/f:prod") -> list[str]:
        return [reply.headers["x-garnish-version"] for reply in asyncio.run(post_all(split, headers, path))]

    by_id, by_session = versions(ids), versions(sessions)
    assert versions(ids) == by_id
    assert versions(sessions) == by_session == versions(sessions, "/v1/completions")
    assert set(by_id) | set(by_session) == {"1", "2"}
    split.client().put("/functions/f/aliases/prod", json={"weights": {"1": 0.5, "2": 0.5}})
    later = versions(sessions)
    assert all(after == "2" for before, after in zip(by_session, later, strict=True) if before == "2")
    assert later.count("2") > by_session.count("2")


def test_odd_sessions(split: Running) -> None:
    client = split.client()
    for session in ("", "a b", "ü", "a" * 256):
        headers = {"x-garnish-session": session.encode()}
        assert client.post("/invoke/f:prod", json=CALL, headers=headers).status_code == 200
    reply = client.post("/invoke/f:prod", json=CALL, headers={"x-garnish-session": "a" * 257})
    assert (reply.status_code, reply.json()["error"]["param"]) == (422, "x-garnish-session")


async def move_then_die(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    await node.until(node.go_on)
    raise Cut


async def slow(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    await asyncio.sleep(0.02)
    yield token(0, "t")
    yield done(asked, 1)


def test_a_retry_elsewhere_keeps_the_version(split: Running) -> None:
    client = split.client()
    split.nodes[0].publish(split.url, state="draining")
    dying = split.node(move_then_die)

    async def talk() -> httpx.Response:
        calling = asyncio.ensure_future(post_all(split, [{}], "/invoke/f"))
        await asyncio.to_thread(dying.began.wait, 30)
        split.nodes[0].publish(split.url)
        moved = await asyncio.to_thread(client.put, "/functions/f/aliases/latest", json={"version": 1})
        assert moved.status_code == 200
        dying.go_on.set()
        return (await calling)[0]

    reply = asyncio.run(talk())
    assert (reply.status_code, reply.headers["x-garnish-version"], reply.headers["x-garnish-node"]) == (
        200,
        "2",
        "node-0",
    )
    assert [asked.adapter.digest for asked in split.nodes[0].received if asked.adapter] == [digests(client)[2]]


def test_rollbacks_under_load_never_give_a_wrong_version(split: Running) -> None:
    """A call that began after a rollback was acknowledged, and ended before the next one was asked for, has that
    version; every call has the digest of the version that it names."""
    client = split.client()
    known = digests(client)
    split.nodes[0].script = slow
    key = {"authorization": f"Bearer {split.keys['acme']}"}

    async def main() -> int:
        settled: int | None = None
        checked, ended, progress = 0, False, asyncio.Event()

        async def load(http: httpx.AsyncClient) -> None:
            nonlocal checked
            while not ended:
                before = settled
                reply = await http.post("/invoke/f", json=CALL)
                assert reply.status_code == 200
                version = reply.json()["version"]
                assert reply.json()["digest"] == known[version]
                assert reply.headers["x-garnish-version"] == str(version)
                if before is not None and before == settled:
                    assert version == before
                    checked += 1
                    progress.set()

        plain = httpx.AsyncClient(base_url=split.url, headers=key, timeout=60, verify=False)
        async with plain as http, asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(load(http))
            for turn in range(8):
                settled = None
                if turn % 2:
                    reply = await http.put("/functions/f/aliases/latest", json={"version": 2})
                else:
                    reply = await http.post("/functions/f/rollback", json={})
                assert reply.status_code == 200
                settled = reply.json()["version"]
                wanted = checked + 16
                while checked < wanted:
                    progress.clear()
                    await progress.wait()
            ended = True
        return checked

    assert asyncio.run(main()) >= 8 * 16
    ran = {asked.adapter.digest for asked in split.nodes[0].received if asked.adapter}
    assert ran == set(known.values())


def test_deletes_wait_for_nobody_and_end_nothing_unless_forced(
    split: Running, stories_adapters: dict[str, Path]
) -> None:
    client = split.client()
    holding = split.nodes[0]

    async def held(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
        yield Started(node=node.node_id, cold_start="none")
        yield token(0, "first")
        await node.until(node.go_on)
        yield token(1, " last")
        yield done(asked, 2)

    holding.script = held

    async def talk(force: bool) -> httpx.Response:
        holding.began.clear()
        holding.go_on.clear()
        calling = asyncio.ensure_future(post_all(split, [{}], "/invoke/f"))
        await asyncio.to_thread(holding.began.wait, 30)
        query = {"force": "true"} if force else {}
        assert (await asyncio.to_thread(client.delete, "/functions/f", params=query)).status_code == 204
        gone = await asyncio.to_thread(client.post, "/invoke/f", json=CALL)
        assert gone.status_code == 404
        if not force:
            assert not calling.done()
            holding.go_on.set()
        return (await calling)[0]

    ended = asyncio.run(talk(force=False))
    assert (ended.status_code, ended.json()["output"]["text"]) == (200, "first last")
    again = client.post("/deploy/f", files=upload(stories_adapters["pirate"]))
    assert (again.status_code, again.json()["version"]) == (201, 3)
    cancelled = asyncio.run(talk(force=True))
    assert (cancelled.status_code, cancelled.json()["error"]["type"]) == (499, "cancelled")
