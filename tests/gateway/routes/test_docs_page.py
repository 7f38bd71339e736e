"""GET /docs: the API as a page, which needs neither a key nor anything from elsewhere."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from running_gateway import Running
from served_app import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.http.routing import mounted
from gateway.routes import docs, openapi

LINK = re.compile(r'(?:src|href|spec-url)="([^"]*)"')
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def test_everything_comes_from_the_gateway_itself(gateway: Running) -> None:
    """The page, what it links to, and their headers; no key is sent."""
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        page = client.get("/docs")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
        assert not [source for source in policy.values() if "http" in source or "*" in source]
        assert page.headers["cache-control"] == "no-cache"
        links = LINK.findall(page.text)
        assert {"openapi.json", f"docs/{docs.VIEWER}"} <= set(links)
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|https?://|//", page.text.replace("</", ""))
        kinds = {}
        for link in links:
            if not link.startswith("data:"):
                reply = client.get(f"/{link}")
                assert (reply.status_code, reply.headers.get("x-content-type-options", "nosniff")) == (200, "nosniff")
                kinds[link.rpartition(".")[2]] = reply.headers["content-type"]
        assert kinds == {
            "css": "text/css; charset=utf-8",
            "json": "application/json",
            "js": "text/javascript; charset=utf-8",
        }
        viewer = client.get(f"/docs/{docs.VIEWER}")
        assert "immutable" in viewer.headers["cache-control"]
        assert client.get("/docs/LICENSE").status_code == 404
        assert client.get("/docs?x=1").status_code == 422


def test_the_viewer_is_the_one_that_the_notice_names() -> None:
    notice = (docs.FOLDER / "NOTICE.md").read_text()
    digest = hashlib.sha256((docs.FOLDER / docs.VIEWER).read_bytes()).hexdigest()
    assert digest in notice
    assert docs.VIEWER in notice


PROBE = """
setInterval(() => {
  const shown = document.querySelector("openapi-explorer").shadowRoot?.textContent ?? "";
  if (shown.includes("/invoke/{target}")) document.body.append("DRAWN " + shown.includes("Functions"));
}, 200);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """With the page's own headers; the probe is one more script from the same address, since the viewer draws into a
    shadow root that a dump of the document leaves out."""
    asked: list[str] = []

    async def page(request: Request) -> Response:
        asked.append(request.url.path)
        content = (docs.FOLDER / "index.html").read_text().replace("</body>", '<script src="probe.js"></script></body>')
        return Response(content, headers=docs.HEADERS, media_type="text/html")

    async def probe(request: Request) -> Response:
        return Response(PROBE, media_type="text/javascript")

    routes = [Route("/docs", page), Route("/probe.js", probe), *mounted([*docs.routes, *openapi.routes])]
    with served(Starlette(routes=routes)) as url:
        assert CHROMIUM is not None
        shown = subprocess.run(
            [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--virtual-time-budget=10000",
             "--dump-dom", f"{url}/docs"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert asked == ["/docs"]
    assert "DRAWN true" in shown.stdout
    assert "CONSOLE" not in shown.stderr, "nothing was refused by the policy"
