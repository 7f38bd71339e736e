"""GET /console: its files and their headers, as a browser gets them."""

from __future__ import annotations

import re

from running_gateway import Running, plain_client

from gateway.routes import console

IMPORT = re.compile(r'^import .* from "\./([\w.]+)";$|^} from "\./([\w.]+)";$', re.MULTILINE)
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser|srcdoc")
STORED = re.compile(r"localStorage|sessionStorage|indexedDB|document\.cookie")


def test_the_page_is_made_of_the_gateways_own_files_alone(shared_gateway: Running) -> None:
    with plain_client(shared_gateway.url) as client:
        page = client.get("/console")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
        assert not [source for source in policy.values() if "http" in source or "*" in source or "unsafe" in source]
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|https?:", page.text)
        wanted, seen = ["console.css", "app.js"], set[str]()
        while wanted:
            name = wanted.pop()
            if name in seen:
                continue
            seen.add(name)
            reply = client.get(f"/console/{name}")
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/css" if name.endswith("css") else "text/javascript")
            assert reply.headers["x-content-type-options"] == "nosniff"
            wanted += [one or other for one, other in IMPORT.findall(reply.text)]
            assert not MARKUP.search(reply.text), name
            assert not STORED.search(reply.text), name
        assert seen == set(console.FILES), "every file is used"


def test_a_file_that_did_not_change_is_not_sent_again(shared_gateway: Running) -> None:
    with plain_client(shared_gateway.url) as client:
        first = client.get("/console/app.js")
        assert first.headers["cache-control"] == "no-cache"
        again = client.get("/console/app.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert client.get("/console/app.js", headers={"if-none-match": '"other"'}).content == first.content
        assert client.get("/console/dom.js").headers["etag"] != first.headers["etag"]


def test_nothing_else_of_the_disk_is_served(shared_gateway: Running) -> None:
    with plain_client(shared_gateway.url) as client:
        for path in ("index.html", "../app.py", "%2e%2e/app.py", "..%2fapp.py", "app.js%00", "app.js/app.js"):
            assert client.get(f"/console/{path}").status_code == 404, path
        assert client.get("/console?x=1").status_code == 422


def test_a_browser_that_asks_for_the_front_is_sent_there(shared_gateway: Running) -> None:
    with plain_client(shared_gateway.url) as client:
        reply = client.get("/", headers={"accept": "text/html,*/*"})
        assert (reply.status_code, reply.headers["location"]) == (303, "console")
        assert client.get("/").json()["links"]["console"] == "/console"
