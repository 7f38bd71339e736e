"""Nodes killed with -9 in the middle of an answer, behind one gateway: the caller reads what one node would say."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_service import Service, descendants, eventually

NODES = 3
"""Of the fixture `trio`."""
CALL = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.05, "frequency_penalty": 0.01},
]
PARTS = ("api", "engine", "node")
KILLS, MORE_KILLS = 3, 50
TRIES = 20
"""A call may end before its node is killed."""


def records(service: Service) -> list[dict[str, Any]]:
    with service.client() as http:
        return [entry["record"] for entry in http.get("/nodes").raise_for_status().json()["nodes"]]


def all_ready(service: Service) -> bool:
    """None runs anything, either: the last record of one that was killed may say so for a while."""
    return sum(record["state"] == "ready" and not record["running"] for record in records(service)) == NODES


def listening(port: int) -> int:
    """The process that listens there."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                held = {os.readlink(file) for file in (entry / "fd").iterdir()}
            except OSError:
                continue
            if held & inodes:
                return int(entry.name)
    raise LookupError(f"nobody listens on port {port}")


def kill(service: Service, node: str, part: str, number: signal.Signals = signal.SIGKILL) -> int:
    """The node's API process, its engine, or its supervisor, with which both go. Returns the process's id."""
    url = next(record["url"] for record in records(service) if record["id"] == node)
    api = listening(int(url.rpartition(":")[2]))
    supervisor = int(Path(f"/proc/{api}/stat").read_text().rpartition(")")[2].split()[1])
    below = descendants(supervisor)
    engine = next(pid for pid, command in below.items() if "node_agent.engine_process" in command)
    pid = {"api": api, "engine": engine, "node": supervisor}[part]
    os.kill(pid, number)
    return pid


def read(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def streamed(
    service: Service, way: dict[str, Any], cuts: list[tuple[int, str]], number: signal.Signals = signal.SIGKILL
) -> tuple[list[int], str, Any]:
    """Token ids, text and the last event. `cuts`: after how many tokens which part of the serving node is killed, or
    gets another signal and is killed at the end."""
    ids: list[int] = []
    text, left, killed, stopped = "", list(cuts), set[str](), list[int]()
    body = {**CALL, **way, "stream": True}
    with service.client("acme") as http, http.stream("POST", "/invoke/dragon", json=body) as reply:
        for name, said in read(reply.iter_lines()):
            if name != "token":
                for pid in stopped:
                    os.kill(pid, signal.SIGKILL)
                return ids, text, said
            ids += [said["token_id"]] if said["token_id"] is not None else []
            text += said["text"]
            if left and len(ids) >= left[0][0] and (serving := serves(service, killed)):
                killed.add(serving)
                pid = kill(service, serving, left.pop(0)[1], number)
                stopped += [] if number == signal.SIGKILL else [pid]
    raise AssertionError("the stream has no end")


def serves(service: Service, killed: Collection[str] = ()) -> str | None:
    """The node that runs the only call. Those that were killed just now may seem to run it still."""
    running = [record["id"] for record in records(service) if record["running"] and record["id"] not in killed]
    return running[0] if len(running) == 1 else None


def whole(service: Service, way: dict[str, Any], part: str) -> dict[str, Any]:
    """A reply that is no stream, whose node was killed while it ran; it may have ended before."""
    replies: list[dict[str, Any]] = []

    def call() -> None:
        with service.client("acme") as http:
            replies.append(http.post("/invoke/dragon", json={**CALL, **way, "logprobs": 0}).json())

    calling = threading.Thread(target=call)
    calling.start()
    assert eventually(lambda: bool(replies or serves(service)), 60)
    if not replies and (serving := serves(service)):
        kill(service, serving, part)
    calling.join(120)
    return replies[0]


def check_kills(service: Service, count: int, seed: int) -> None:
    """Until so many calls have gone on elsewhere, whatever part of a node was killed, streamed and not: of three, each
    another."""
    draw = random.Random(seed)
    usual = [streamed(service, way, []) for way in WAYS]
    resumed = tries = 0
    while resumed < count:
        tries += 1
        assert tries < count + TRIES, "calls end before their nodes do"
        number, part = draw.randrange(len(WAYS)), PARTS[resumed % len(PARTS)]
        if resumed % 2:
            ids, text, last = streamed(service, WAYS[number], [(draw.randrange(1, 60), part)])
        else:
            last = whole(service, WAYS[number], part)
            assert "output" in last, last
            ids, text = [entry["token_id"] for entry in last["output"]["logprobs"]], last["output"]["text"]
        assert "timing" in last, last
        assert (ids, text) == usual[number][:2]
        assert last["usage"] == usual[number][2]["usage"]
        resumed += last["timing"]["resumed"]
        assert eventually(lambda: all_ready(service), 120), service.logs()


def test_a_stopped_engine_breaks_no_answer(trio: Service) -> None:
    """It keeps its connection and says nothing more: only its heartbeat tells."""
    usual = streamed(trio, WAYS[0], [])
    for _ in range(TRIES):
        ids, _, last = streamed(trio, WAYS[0], [(20, "engine")], signal.SIGSTOP)
        assert eventually(lambda: all_ready(trio), 120), trio.logs()
        assert ids == usual[0]
        if last["timing"]["resumed"]:
            return
    raise AssertionError("calls end before their engines are stopped")


def test_killed_nodes_break_no_answer(trio: Service) -> None:
    check_kills(trio, KILLS, 1)


def test_one_stream_outlives_two_nodes_and_no_third(trio: Service) -> None:
    usual = streamed(trio, WAYS[1], [])
    seen: dict[int, tuple[list[int], str, Any]] = {}
    for _ in range(TRIES):
        deaths = 3 if 2 in seen else 2
        ids, text, last = streamed(trio, WAYS[1], [(5, "api"), (10, "api"), (15, "api")][:deaths])
        if "error" in last or last["timing"]["resumed"] == deaths:
            seen[deaths] = ids, text, last
        assert eventually(lambda: all_ready(trio), 120), trio.logs()
        if 3 in seen:
            break
    assert seen[2][:2] == usual[:2] and seen[2][2]["usage"] == usual[2]["usage"]
    assert seen[3][2]["error"]["type"] == "node_failed"
    assert seen[3][0] == usual[0][: len(seen[3][0])] and usual[1].startswith(seen[3][1])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_killed_nodes_break_no_answer(trio: Service) -> None:
    check_kills(trio, MORE_KILLS, 2)
