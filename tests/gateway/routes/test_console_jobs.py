"""The console's pages of events and batches, as a person uses them: a real browser, a real gateway, a stub node."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_gateway import Running, start_gateway, until, upload
from stub_node import StubNode, hang_after_first
from test_console_in_browser import AXE, HOSTILE, _violations, check_quiet, go, hostile, page, sign_in

from cluster.messages import Event, Failed, GenerateRequest
from tests.support.browser import CHROMIUM, Browser

__all__ = ["page"]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")

REFUSED, HANGS, ANSWERED = 7, 8, 3
"""`max_tokens` of calls, by which the node tells them apart."""


async def script(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    if asked.max_tokens == REFUSED:
        yield Failed("validation_failed", HOSTILE)
        return
    async for event in (hang_after_first if asked.max_tokens == HANGS else hostile)(node, asked):
        yield event


@pytest.fixture(scope="module")
def jobs(
    stories_dir: Path, stories_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with ExitStack() as stack:
        running = start_gateway(stack, stories_dir, tmp_path_factory.mktemp("gateway"))
        running.node(script, max_rows=8)
        assert running.client().post("/deploy/story", files=upload(stories_adapters["pirate"])).status_code == 201
        yield running


def submit(client: httpx.Client, max_tokens: int) -> str:
    reply = client.post("/invoke/story", json={"prompt": "Once", "max_tokens": max_tokens, "background": True})
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


def state_of(client: httpx.Client, event_id: str) -> str:
    return str(client.get(f"/invocations/{event_id}").json()["state"])


def make_batch(client: httpx.Client, max_tokens: int, url: str = "/invoke") -> str:
    body = {"model": "story", "prompt": "Once", "max_tokens": max_tokens}
    lines = [json.dumps({"custom_id": str(n), "method": "POST", "url": url, "body": body}) for n in range(3)]
    files = {"file": ("calls.jsonl", "\n".join(lines).encode())}
    uploaded = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    order = {"input_file_id": uploaded, "endpoint": "/invoke", "completion_window": "24h"}
    reply = client.post("/v1/batches", json=order | {"metadata": {HOSTILE[:60]: HOSTILE}})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def rows(page: Browser) -> list[list[str]]:
    cells = "[...row.querySelectorAll('th, td')].map((cell) => cell.textContent)"
    found: list[list[str]] = page.run(f"[...document.querySelectorAll('tbody tr')].map((row) => {cells})")
    return found


def check_accessible(page: Browser) -> None:
    page.run(AXE.read_text() + "; 0")
    found: list[Any] = _violations(page)
    assert not found, found


def test_events_are_listed_cancelled_and_redriven(page: Browser, jobs: Running) -> None:
    client = jobs.client()
    done, dead, also_dead, hangs = (submit(client, kind) for kind in (ANSWERED, REFUSED, REFUSED, HANGS))
    wanted = {done: "succeeded", dead: "failed", also_dead: "failed", hangs: "running"}
    until(lambda: {each: state_of(client, each) for each in wanted} == wanted)
    sign_in(page, jobs, "acme")
    go(page, "events")
    page.until("document.querySelectorAll('tbody tr').length === 4")
    assert {row[0]: row[2] for row in rows(page)} == wanted
    assert {row[5] for row in rows(page)} == {"–", f"validation_failed: {HOSTILE}"}
    check_accessible(page)
    page.click(f"#cancel-{hangs}")
    page.click("#yes")
    page.until_text(f"{hangs} is cancelled", "[role=status]")
    page.until(f"document.querySelector('#cancel-{hangs}') === null")
    assert state_of(client, hangs) == "cancelled"
    page.click(f"#redrive-{dead}")
    page.until_text(f"{dead} is queued again", "[role=status]")
    until(lambda: state_of(client, dead) == "failed")
    page.click("#redrive-all")
    page.press("Escape")
    page.until("document.querySelector('dialog') === null")
    page.click("#redrive-all")
    page.click("#yes")
    page.until_text("2 queued again", "[role=status]")
    page.run("document.querySelector('#state').value = 'succeeded'")
    page.fill("#of", "story")
    page.press("Enter")
    page.until(f"document.querySelectorAll('tbody tr').length === 1 && document.querySelector('#event-{done}')")
    page.click(f"#event-{done}")
    page.until(f"document.querySelector('.output')?.textContent === {json.dumps(HOSTILE)}")
    check_accessible(page)
    check_quiet(page, jobs, "acme")


def test_a_long_list_of_events_comes_by_pages(page: Browser, jobs: Running) -> None:
    client = jobs.client()
    ids = [submit(client, ANSWERED) for _ in range(25)]
    until(lambda: all(state_of(client, each) == "succeeded" for each in ids[-3:]))
    until(lambda: not client.get("/invocations?state=queued").json()["invocations"])
    until(lambda: not client.get("/invocations?state=running").json()["invocations"])
    listed, after = list[str](), ""
    while after is not None:
        told = client.get("/invocations", params={"limit": 20, "after": after}).json()
        listed += [item["id"] for item in told["invocations"]]
        after = told["next"]
    sign_in(page, jobs, "acme")
    go(page, "events")
    shown = "[...document.querySelectorAll('tbody a')].map((each) => each.textContent).join()"
    for button, first in ((None, 0), ("next", 20), ("back", 0)):
        if button:
            page.click(f"#{button}")
        page.until(f"{shown} === {json.dumps(','.join(listed[first : first + 20]))}")


def test_batches_tell_how_far_they_are_and_what_is_wrong(page: Browser, jobs: Running) -> None:
    client = jobs.client()
    done, wrong, hangs = make_batch(client, ANSWERED), make_batch(client, ANSWERED, HOSTILE), make_batch(client, HANGS)

    def statuses() -> dict[str, str]:
        return {each["id"]: each["status"] for each in client.get("/v1/batches").json()["data"]}

    until(lambda: statuses() == {done: "completed", wrong: "failed", hangs: "in_progress"})
    sign_in(page, jobs, "acme")
    go(page, "batches")
    page.until("document.querySelectorAll('tbody tr').length === 3")
    assert [row[0] for row in rows(page)] == [hangs, wrong, done]
    assert {row[0]: row[2:6] for row in rows(page)}[done] == ["completed", "3", "3", "0"]
    check_accessible(page)
    page.click(f"#batch-{done}")
    page.until_text("3 of 3, 0 failed")
    page.until_text(f"garnish batch get {done}")
    go(page, f"batches/{wrong}")
    page.until("document.querySelectorAll('tbody tr').length === 3")
    page.until_text("<img src=x", "main")
    check_accessible(page)
    go(page, f"batches/{hangs}")
    page.until_text("0 of 3, 0 failed")
    page.click("#cancel")
    page.click("#yes")
    page.until_text(f"{hangs} is cancel", "[role=status]")
    page.until("document.querySelector('#cancel') === null")
    until(lambda: statuses()[hangs] == "cancelled")
    check_quiet(page, jobs, "acme")


def test_another_tenants_are_not_shown(page: Browser, jobs: Running) -> None:
    client = jobs.client()
    event, batch = submit(client, ANSWERED), make_batch(client, ANSWERED)
    sign_in(page, jobs, "other")
    go(page, "events")
    page.until_text("No asynchronous calls.")
    go(page, "batches")
    page.until_text("No batches.")
    for place in (f"events/{event}", f"batches/{batch}"):
        go(page, place)
        page.until_text("not current")
    page.run(f"location.hash = '#/events/' + encodeURIComponent({json.dumps(HOSTILE)})")
    page.until_text("not current")
    check_quiet(page, jobs, "other")
