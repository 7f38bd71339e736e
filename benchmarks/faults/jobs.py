"""Asynchronous calls and batches during the faults of chaos.py, and the outcome of those acknowledged.

Their functions are copies of the first adapter's under their own names, so that the metering shows how often each was
run. `WRONG` names what is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import httpx

from benchmarks.common.http_service import HttpService
from gateway.batches.messages import ENDED as BATCH_ENDED
from gateway.batches.run import FLUSH_LINES
from gateway.events.records import ENDED

EVENTS, BATCHED = "evented", "batched"
LINES = 60
EVENT_PAUSE_S, BATCH_PAUSE_S = 0.3, 12.0
TRY_PAUSE_S = 0.3
REST_S = 300.0
"""Limit for all to end after the last harm: what a killed worker ran is queued again two minutes later."""
USAGE_S = 30.0
ROWS = 64
"""Calls of a batch under way at once, at most: two nodes' rows."""
WRONG = (
    "events_lost",  # acknowledged, and not ended in the end
    "events_overrun",  # begun more than retries + 1 times
    "events_changed",  # ended one way, and then another
    "events_wrong",  # succeeded with another text than the adapter's
    "batches_lost",  # acknowledged, and not completed in the end
    "lines_lost",  # calls of completed batches that are in none of their files
    "lines_double",  # in them more than once
    "lines_wrong",  # answered with another text than the adapter's
    "lines_repeated",  # run more often than each harm can repeat: FLUSH_LINES, and those under way
)
"""Counts that have to be 0."""


class Jobs:
    """`texts`: what the adapter says to each prompt."""

    def __init__(self, service: HttpService, seed: int, tokens: int, texts: Mapping[str, str]) -> None:
        self._service, self._seed, self._tokens, self._texts = service, seed, tokens, texts
        self._events: dict[str, str] = {}
        """Prompts by the ids of events that were acknowledged."""
        self._batches: dict[str, list[str]] = {}
        """Prompts, by line, of batches that were acknowledged."""

    async def run(self, session: aiohttp.ClientSession, until: float) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._submit_events(session, until, random.Random(self._seed * 10 + 1)))
            group.create_task(self._submit_batches(session, until, random.Random(self._seed * 10 + 2)))

    async def _submit_events(self, session: aiohttp.ClientSession, until: float, draw: random.Random) -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            prompt, key = draw.choice(list(self._texts)), f"{self._seed}-{number}"
            body = {**self._call(prompt), "background": True}
            url, headers = f"{self._service.url}/invoke/{EVENTS}", {"idempotency-key": key}
            reply = await _until_taken(session, url, until, headers=headers, json=body)
            if reply is not None:
                self._events[reply["id"]] = prompt
            await asyncio.sleep(EVENT_PAUSE_S)

    async def _submit_batches(self, session: aiohttp.ClientSession, until: float, draw: random.Random) -> None:
        while time.monotonic() < until:
            prompts = [draw.choice(list(self._texts)) for _ in range(LINES)]
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", self._lines(prompts), filename="calls.jsonl")
            url = f"{self._service.url}/v1"
            uploaded = await _once(session, f"{url}/files", data=form)
            if uploaded is not None:
                order = {"input_file_id": uploaded["id"], "endpoint": "/invoke", "completion_window": "24h"}
                batch = await _once(session, f"{url}/batches", json=order)
                if batch is not None:
                    self._batches[batch["id"]] = prompts
            await asyncio.sleep(BATCH_PAUSE_S if uploaded is not None else TRY_PAUSE_S)

    def _lines(self, prompts: Sequence[str]) -> bytes:
        calls = [
            {"custom_id": str(at), "method": "POST", "url": "/invoke", "body": {"model": BATCHED, **self._call(prompt)}}
            for at, prompt in enumerate(prompts)
        ]
        return "\n".join(map(json.dumps, calls)).encode()

    def _call(self, prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}

    def check(self, harms: int) -> tuple[Counter[str], Counter[str]]:
        """Waits until all have ended, REST_S at most. Returns what there was, and of WRONG what is wrong."""
        deadline = time.monotonic() + REST_S
        with self._service.client() as client:
            there, wrong = self._check_events(client, deadline)
            more, also_wrong = self._check_batches(client, deadline, harms)
        return there + more, wrong + also_wrong

    def _check_events(self, client: httpx.Client, deadline: float) -> tuple[Counter[str], Counter[str]]:
        wrong, events = Counter[str](), _ended(client, "/invocations", list(self._events), ENDED, "state", deadline)
        wrong["events_lost"] = len(self._events) - len(events)
        for event_id, event in events.items():
            wrong["events_overrun"] += len(event["attempts"]) > event["retries"] + 1
            wrong["events_changed"] += client.get(f"/invocations/{event_id}").json() != event
            if event["state"] == "succeeded":
                wrong["events_wrong"] += event["result"]["output"]["text"] != self._texts[self._events[event_id]]
        states = Counter(f"events {event['state']}" for event in events.values())
        return states + Counter(events=len(self._events)), wrong

    def _check_batches(self, client: httpx.Client, deadline: float, harms: int) -> tuple[Counter[str], Counter[str]]:
        listed = client.get("/v1/batches", params={"limit": 1000}).raise_for_status().json()["data"]
        # Also those whose acknowledgement was lost: they run all the same.
        batches = _ended(client, "/v1/batches", [each["id"] for each in listed], BATCH_ENDED, "status", deadline)
        wrong, there = Counter[str](), Counter[str](batches=len(self._batches))
        answered = 0
        for batch_id, batch in batches.items():
            lines = _answers(client, batch)
            answered += len(lines)
            if batch_id in self._batches:
                wrong += self._check_lines(lines, self._batches[batch_id], batch)
                there["lines"] += len(lines)
                there["lines failed"] += batch["request_counts"]["failed"]
        wrong["batches_lost"] += sum(batch_id not in batches for batch_id in self._batches)
        repeated = max(0, _runs(client, answered) - answered)
        wrong["lines_repeated"] = max(0, repeated - harms * (FLUSH_LINES + ROWS))
        return there + Counter(lines_run_again=repeated), wrong

    def _check_lines(
        self, lines: Sequence[dict[str, Any]], prompts: Sequence[str], batch: dict[str, Any]
    ) -> Counter[str]:
        ids = Counter(line["custom_id"] for line in lines)
        wrong = Counter(batches_lost=int(batch["status"] != "completed"))
        wrong["lines_lost"] = sum(str(at) not in ids for at in range(len(prompts)))
        wrong["lines_double"] = sum(count - 1 for count in ids.values())
        for line in lines:
            reply = line["response"]
            if reply is not None and reply["status_code"] == 200:
                text = reply["body"]["output"]["text"]
                wrong["lines_wrong"] += text != self._texts[prompts[int(line["custom_id"])]]
        return wrong


async def _until_taken(session: aiohttp.ClientSession, url: str, until: float, **sent: Any) -> dict[str, Any] | None:
    """Sends it again and again. Returns None if it was not taken until then."""
    while time.monotonic() < until:
        reply = await _once(session, url, **sent)
        if reply is not None:
            return reply
        await asyncio.sleep(TRY_PAUSE_S)
    return None


async def _once(session: aiohttp.ClientSession, url: str, **sent: Any) -> dict[str, Any] | None:
    """Returns None if it was not answered, or refused."""
    try:
        async with session.post(url, **sent) as reply:
            accepted: dict[str, Any] | None = await reply.json() if reply.status in (200, 202) else None
            return accepted
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def _ended(
    client: httpx.Client, path: str, ids: Sequence[str], ends: Sequence[str] | frozenset[str], field: str, until: float
) -> dict[str, dict[str, Any]]:
    """Returns those that have ended, by id."""
    records: dict[str, dict[str, Any]] = {}
    while True:
        for each in ids:
            if each not in records:
                reply = client.get(f"{path}/{each}")
                if reply.status_code == 200 and reply.json()[field] in ends:
                    records[each] = reply.json()
        if len(records) == len(ids) or time.monotonic() > until:
            return records
        time.sleep(1.0)


def _answers(client: httpx.Client, batch: dict[str, Any]) -> list[dict[str, Any]]:
    files = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name] is not None]
    texts = [client.get(f"/v1/files/{each}/content").raise_for_status().text for each in files]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _runs(client: httpx.Client, at_least: int) -> int:
    """Returns how often the batches' function was run, by the metering, which comes some seconds later."""
    until = time.monotonic() + USAGE_S
    while True:
        rows = client.get("/usage", params={"group_by": "function"}).raise_for_status().json()["rows"]
        count = sum(int(row["requests"]) for row in rows if row["function"] == BATCHED)
        if count >= at_least or time.monotonic() > until:
            return count
        time.sleep(1.0)
