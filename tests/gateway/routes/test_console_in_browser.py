"""The console as a person uses it: a real browser, a real gateway with its registry; only the nodes are stand-ins."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from running_gateway import Running, start_gateway, upload
from stub_node import StubNode, done, hang_after_first, token

from cluster.messages import Event, GenerateRequest, Started
from cluster.news import Resident
from tests.support.browser import CHROMIUM, Browser, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")

AXE = Path(__file__).parents[2] / "data" / "axe-core" / "axe-4.10.3.min.js"
HOSTILE = '<img src=x onerror="window.taken=1"></pre><script>window.taken=1</script>'
ANSWERED = "Failed to load resource: the server responded with a status of 40"
"""What the browser notes of each error that the gateway answers: 403 where a tenant's key asks for the pools."""
PLACES = {
    "functions": "#function-story",
    "functions/story": ".waterfall rect",
    "deploy": "#drop",
    "events": "#back",
    "batches": "main p",
    "nodes": "meter",
    "tenants": "tbody a",
    "tenants/acme": "tbody th",
    "pools": "tbody th",
}
"""Each with what is there once its figures are."""


ADAPTER_BYTES = 1 << 20
RESIDENTS = [
    Resident(f"{number:012x}".ljust(64, "0"), "device" if number % 4 else "host", 1000 + number, number % 2)
    for number in range(800)
]


async def hostile(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """Answers with markup; a prompt of more than 20 tokens stays open after the first."""
    if len(asked.token_ids) > 20:
        async for event in hang_after_first(node, asked):
            yield event
        return
    yield Started(node=node.node_id, cold_start="host")
    for index, text in enumerate([HOSTILE[:7], HOSTILE[7:]]):
        yield token(index, text)
    yield done(asked, 2)


@pytest.fixture(scope="module")
def served(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ExitStack() as stack:
        running = start_gateway(stack, stories_dir, tmp_path_factory.mktemp("gateway"))
        running.node(
            hostile,
            residents=RESIDENTS, device=HOSTILE[:40], max_rows=8, adapter_bytes=ADAPTER_BYTES,
        )  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def story(served: Running, stories_adapters: dict[str, Path]) -> Running:
    """The gateway with the function `story`: versions 1 and 2, of which `latest` is the second."""
    client = served.client()
    assert client.delete("/functions/story").status_code in (204, 404)
    for adapter in ("pirate", "ocean"):
        assert client.post("/deploy/story", files=upload(stories_adapters[adapter])).status_code == 201
    assert served.client("admin").put("/tenants/acme", json={"slo": {"ttft_ms": 500}}).status_code == 200
    return served


def start(page: Browser, gateway: Running) -> None:
    page.open("about:blank")
    page.said.clear()
    page.asked.clear()
    page.open(f"{gateway.url}/console")
    page.until("document.querySelector('#key')")


def sign_in(page: Browser, gateway: Running, key: str, tenant: str = "") -> None:
    start(page, gateway)
    page.fill("#key", gateway.keys[key])
    page.fill("#tenant", tenant)
    page.press("Enter")
    page.until("document.querySelector('h1').textContent === 'Functions'")


def go(page: Browser, place: str) -> None:
    page.run(f"location.hash = {json.dumps('#/' + place)}")
    title = place.partition("/")[2] or place.capitalize()
    page.until(f"document.querySelector('h1').textContent === {json.dumps(title)}")


def check_quiet(page: Browser, gateway: Running, key: str) -> None:
    """Nothing was refused by the policy, nothing asked elsewhere, and the key is nowhere but in memory."""
    assert [said for said in page.said if not said.startswith(ANSWERED)] == []
    assert not [url for url in page.asked if not url.startswith((gateway.url, "about:", "data:"))]
    assert not [url for url in page.asked if gateway.keys[key] in url]
    assert page.run("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    assert not page.run("document.documentElement.outerHTML.includes(" + json.dumps(gateway.keys[key]) + ")")
    assert page.run("document.querySelectorAll('img, script:not([type=module])').length") == 0
    assert page.run("window.taken === undefined")


def test_sign_in_deploy_call_and_roll_back(
    page: Browser, served: Running, stories_adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The three ways to choose files: both of them, their folder, and a folder that is dropped."""
    served.client().delete("/functions/tale")
    sign_in(page, served, "acme")
    for version, adapter in enumerate(("pirate", "ocean", "robot"), 1):
        go(page, "deploy")
        page.fill("#name", "tale")
        folder = stories_adapters[adapter]
        if version == 1:
            page.choose_files("#pair", [folder / name for name in ("adapter_config.json", "adapter_model.safetensors")])
        elif version == 2:
            page.choose_files("#folder", [folder])
        else:
            page.drop_files("#drop", [folder])
        page.until_text("adapter_model.safetensors (", "#found")
        page.click("#check")
        page.until_text("It can be deployed", "#answer")
        page.click("#deploy")
        page.until_text(f"has version {version}", "#answer")
    page.click("#answer a")
    page.until("document.querySelector('#qualifier').length === 4")
    page.click("#call")
    page.until_text("TTFT", "#call-status")
    assert page.run("document.querySelector('#output').textContent") == HOSTILE
    page.until("document.querySelectorAll('.waterfall rect').length > 4")
    page.click(".calls summary")
    page.until_text("(chosen)", ".calls")
    page.click("#rollback-latest")
    page.until_text("points to version 3", "dialog")
    page.press("Escape")
    page.until("document.querySelector('dialog') === null")
    assert served.client().get("/functions/tale/aliases/latest").json()["version"] == 3
    page.click("#rollback-latest")
    page.click("#yes")
    page.until_text("latest points to version 2 now")
    assert served.client().get("/functions/tale/aliases/latest").json()["version"] == 2
    check_quiet(page, served, "acme")


def test_a_call_that_is_stopped_ends_on_its_node(page: Browser, story: Running) -> None:
    sign_in(page, story, "acme")
    go(page, "functions/story")
    node = story.nodes[0]
    node.disconnected.clear()
    page.fill("#prompt", "word " * 60)
    page.click("#call")
    page.until_text("first", "#output")
    page.click("#stop")
    page.until_text("Stopped.", "#call-status")
    assert node.disconnected.wait(60)


def _weights(name: str) -> bytes:
    header = json.dumps({name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def test_problems_of_a_deploy_are_listed_as_text(
    page: Browser, served: Running, stories_adapters: dict[str, Path], tmp_path: Path
) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_bytes((stories_adapters["pirate"] / "adapter_config.json").read_bytes())
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(_weights(f"base_model.model.{HOSTILE}.lora_A.weight"))
    sign_in(page, served, "acme")
    go(page, "deploy")
    page.fill("#name", "broken")
    page.choose_files("#pair", [config, weights])
    page.click("#deploy")
    page.until("document.querySelectorAll('#answer tbody tr').length > 0")
    page.until_text("<img src=x", "#answer")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("window.taken === undefined")


def test_a_tenants_key_sees_only_its_own(page: Browser, story: Running) -> None:
    sign_in(page, story, "other")
    page.until_text("No functions yet.")
    page.run("location.hash = '#/nodes'")
    page.until("document.querySelector('h1').textContent === 'Functions'")
    assert page.run("[...document.querySelectorAll('nav a')].map((link) => link.textContent)") == [
        "Functions",
        "Deploy",
        "Events",
        "Batches",
    ]
    page.run("location.hash = '#/functions/story'")
    page.until_text("not current")
    page.run(f"location.hash = '#/functions/' + encodeURIComponent({json.dumps(HOSTILE)})")
    page.until_text("No function can have this name.")
    called = [url for url in page.asked if "/console" not in url]
    assert not [url for url in called if "/nodes" in url or "/tenants" in url or "/metrics" in url]
    check_quiet(page, story, "other")


def test_the_key_ends_with_the_page(page: Browser, story: Running) -> None:
    sign_in(page, story, "acme")
    page.run("[...document.querySelectorAll('button')].find((each) => each.textContent === 'Sign out').click()")
    page.until("document.querySelector('#key').value === ''")
    sign_in(page, story, "acme")
    page.command("Page.reload")
    page.until("document.querySelector('#key').value === ''")
    page.fill("#key", "gsk_acme_0123456789ab_wrong")
    page.press("Enter")
    page.until("document.querySelector('[role=alert]')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_accessible(page: Browser, story: Running, scheme: str) -> None:
    """By axe-core's rules of WCAG 2.1 A and AA, contrast among them."""
    page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    start(page, story)
    page.run(AXE.read_text() + "; 0")
    found = {"sign in": _violations(page)}
    page.fill("#key", story.keys["admin"])
    page.fill("#tenant", "acme")
    page.press("Enter")
    page.until("document.querySelector('h1').textContent === 'Functions'")
    for place, drawn in PLACES.items():
        go(page, place)
        if place == "functions/story":
            page.until("document.querySelector('#qualifier').length === 3")
            page.click("#call")
        page.until(f"document.querySelector('{drawn}')")
        found[place] = _violations(page)
    assert not [place for place, problems in found.items() if problems], found
    check_quiet(page, story, "admin")


def _violations(page: Browser) -> list[Any]:
    checked = "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})"
    each = "[each.id, each.nodes.slice(0, 3).map((node) => node.html)]"
    return page.run(f"{checked}.then((done) => done.violations.map((each) => {each}))")


def test_the_keyboard_reaches_and_does_everything(page: Browser, story: Running) -> None:
    """From the first tab to a call; the focus stays where it was when figures are drawn again."""
    sign_in(page, story, "acme")
    page.until("document.querySelector('#function-story')")
    for _ in range(30):
        page.press("Tab")
        if page.run("document.activeElement.id") == "function-story":
            break
    assert page.run("document.activeElement.id") == "function-story"
    page.press("Enter")
    page.until("document.querySelector('h1').textContent === 'story'")
    assert page.run("document.activeElement === document.querySelector('h1')")
    page.until("document.querySelector('#qualifier').length === 3")
    for _ in range(40):
        page.press("Tab")
        if page.run("document.activeElement.id") == "call":
            break
    page.press("Enter")
    page.until_text("TTFT", "#call-status")


def test_what_is_expected_of_a_function_is_said(page: Browser, story: Running) -> None:
    sign_in(page, story, "acme")
    reply = {"watched": 40.0, "chances": {"within_1_s": 0.25, "within_300_s": 1.0}, "wanted": []}
    fake = f"(url, how) => url.href.endsWith('/forecast') ? Response.json({json.dumps(reply)}) : asked(url, how)"
    page.run(f"const asked = window.fetch; window.fetch = async {fake}")
    go(page, "functions/story")
    page.until("document.body.textContent.includes('within 1 s25 %within 300 s100 %')")


def test_the_memory_map_is_of_the_nodes_adapters(page: Browser, story: Running) -> None:
    """Cells are as wide as adapters are large, and those that have no cell of their own are one cell."""
    sign_in(page, story, "admin", "acme")
    go(page, "nodes")
    page.until("document.querySelector('.tier rect')")
    for tier, capacity in (("device", ADAPTER_BYTES), ("host", 0)):
        held = [each for each in RESIDENTS if each.tier == tier]
        used, total = sum(each.in_use > 0 for each in held), sum(each.bytes for each in held)
        drawn = f"[...document.querySelectorAll('rect.tier-{tier}')].map((cell) => [+cell.getAttribute('width') + 1, "
        cells = page.run(f"{drawn}cell.classList.contains('busy'), cell.textContent])")
        page.until_text(f"{tier}: {len(held)} adapters")
        page.until_text(f"{used} in use")
        own = cells[:300]
        assert len(cells) == min(len(held), 301)
        assert [busy for _, busy, _ in own] == sorted((busy for _, busy, _ in own), reverse=True)
        by_digest = {each.digest[:12]: each for each in held}
        scale = 900 / max(capacity, total)
        for width, busy, text in own[::17]:
            size = by_digest[text.partition(":")[0]].bytes
            assert width == pytest.approx(max(size * scale, 1.5), abs=0.02)
            assert busy == text.endswith("1 requests")
        assert sum(width for width, _, _ in cells) == pytest.approx(total * scale, abs=len(cells) * 0.6)


def test_a_page_asks_once_in_two_seconds_while_it_is_shown(page: Browser, story: Running) -> None:
    sign_in(page, story, "admin", "acme")
    page.asked.clear()
    began = time.monotonic()
    go(page, "nodes")
    page.until("document.querySelector('meter')")
    while len(_asked(page, "/nodes")) < 3:
        page.run("0")
        time.sleep(0.1)
    assert time.monotonic() - began > 3.9
    go(page, "deploy")
    before = len(_asked(page, "/nodes"))
    time.sleep(2.5)
    page.run("0")
    assert len(_asked(page, "/nodes")) == before


def _asked(page: Browser, path: str) -> list[str]:
    return [url for url in page.asked if url.endswith(path)]


def test_functions_come_a_page_at_a_time(page: Browser, story: Running) -> None:
    """Of 130 functions: there and back, and the ones whose names begin so."""
    folder = Path(story.config.registry) / "tenants" / "acme" / "functions"
    record = (folder / "story" / "function.json").read_text()
    names = [f"{letter}-{number:03}" for letter in "ab" for number in range(65)]
    for name in names:
        (folder / name).mkdir()
        (folder / name / "function.json").write_text(record.replace('"story"', json.dumps(name)))
    listed = sorted(each["name"] for each in story.client().get("/functions?limit=1000").json()["functions"])
    assert {*names, "story"} <= set(listed)
    sign_in(page, story, "acme")
    shown = "[...document.querySelectorAll('tbody th a')].map((link) => link.textContent).join()"
    for first, button in ((0, "next"), (50, "next"), (100, "back"), (50, "back"), (0, "")):
        page.until(f"{shown} === {json.dumps(','.join(listed[first : first + 50]))}")
        if button:
            page.click(f"#{button}")
    for prefix in ("b-06", "a", "zz", "b-064", "B"):
        wanted = [name for name in listed if name.startswith(prefix)][:50]
        page.fill("#search", prefix)
        page.press("Enter")
        page.until(f"{shown} === {json.dumps(','.join(wanted))}")
    for name in names:
        shutil.rmtree(folder / name)
