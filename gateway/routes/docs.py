"""GET /docs: the API as a web page, rendered in the browser from /openapi.json. It needs no key and no other site.

`python -m gateway.routes.openapi` regenerates openapi.json; a test compares it with the routes.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.page_files import FOREVER, page_file, page_headers
from gateway.http.routing import Routes

routes: Routes[None] = Routes()

GATEWAY = Path(__file__).parents[1]
FOLDER, OPENAPI = GATEWAY / "docs_page", GATEWAY / "openapi.json"
VIEWER = "openapi-explorer-2.4.820.min.js"
"""Vendored file; its version is part of its name, so browsers may cache it forever."""
HEADERS = page_headers({"style-src": "'self' 'unsafe-inline'"})  # the viewer uses inline styles

routes.public("GET /docs")(page_file(FOLDER / "index.html", "docs", HEADERS))
routes.public("GET /docs/page.css")(page_file(FOLDER / "page.css", "docs", HEADERS))
routes.public(f"GET /docs/{VIEWER}")(page_file(FOLDER / VIEWER, "docs", HEADERS, FOREVER))

_DOCUMENT = OPENAPI.read_bytes()


@routes.public("GET /openapi.json")
async def openapi(_: Request) -> Response:
    return Response(_DOCUMENT, media_type="application/json")
