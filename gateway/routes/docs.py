"""GET /docs: the API as a page, drawn in the browser from /openapi.json; no key needed, nothing from elsewhere.

`python -m gateway.routes.openapi` makes openapi.json anew; a test compares it with the routes.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.routing import Endpoint, Routes

routes = Routes()

GATEWAY = Path(__file__).parents[1]
FOLDER, OPENAPI = GATEWAY / "docs_page", GATEWAY / "openapi.json"
VIEWER = "openapi-explorer-2.4.820.min.js"
"""A vendored file; its version is part of its name, so that browsers may keep it for ever."""
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self' 'unsafe-inline'",  # the viewer sets style attributes
    "img-src": "data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
REVALIDATE, FOREVER = "no-cache", "public, max-age=31536000, immutable"


def _file(name: str, media_type: str, cache: str) -> Endpoint:
    """Returns the endpoint that answers with one file of the page."""
    content = (FOLDER / name).read_bytes()

    async def docs(_: Request) -> Response:
        return Response(content, headers={**HEADERS, "cache-control": cache}, media_type=media_type)

    return docs


routes.public("GET /docs")(_file("index.html", "text/html", REVALIDATE))
routes.public("GET /docs/page.css")(_file("page.css", "text/css", REVALIDATE))
routes.public(f"GET /docs/{VIEWER}")(_file(VIEWER, "text/javascript", FOREVER))

_DOCUMENT = OPENAPI.read_bytes()


@routes.public("GET /openapi.json")
async def openapi(_: Request) -> Response:
    return Response(_DOCUMENT, media_type="application/json")
