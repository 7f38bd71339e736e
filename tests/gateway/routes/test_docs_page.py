"""GET /docs: the API as a page, which needs neither a key nor anything from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from running_gateway import Running, plain_client
from served_app import served
from starlette.applications import Starlette

from gateway.http.routing import mounted
from gateway.routes import docs
from tests.support.browser import CHROMIUM, browser

LINK = re.compile(r'(?:src|href|spec-url)="([^"]*)"')


def test_everything_comes_from_the_gateway_itself(shared_gateway: Running) -> None:
    """The page, what it links to, and their headers; no key is sent."""
    with plain_client(shared_gateway.url) as client:
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


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """With the page's own headers, which refuse nothing that it needs."""
    with served(Starlette(routes=mounted(docs.routes))) as url, browser(tmp_path) as page:
        page.open(f"{url}/docs")
        shown = "document.querySelector('openapi-explorer').shadowRoot.textContent"
        page.until(f"{shown}.includes('/invoke/{{target}}') && {shown}.includes('Functions')")
        assert page.said == []
        assert {address.removeprefix(url) for address in page.asked if not address.startswith("data:")} == {
            "/docs", "/docs/page.css", f"/docs/{docs.VIEWER}", "/openapi.json",
        }  # fmt: skip
