"""GET /console: a web page that shows the service. The page itself needs no key.

It reads its data with the key that the user types into it, through the public routes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.http.page_files import page_file, page_headers
from gateway.http.responses import json_response
from gateway.http.routing import Routes
from gateway.routes.health import VERSION

routes: Routes[None] = Routes()

FOLDER = Path(__file__).parents[1] / "console"
# Trusted Types keep scripts from turning text into markup.
HEADERS = page_headers({"require-trusted-types-for": "'script'", "trusted-types": "'none'"})
INDEX = "index.html"
LINKS = {
    "openapi": "/openapi.json",
    "docs": "/docs",
    "console": "/console",
    "models": "/v1/models",
    "health": "/healthz",
    "ready": "/readyz",
}
"""Paths that the front page's JSON names."""
FILES = sorted(file.name for file in FOLDER.iterdir() if file.suffix in (".css", ".js"))

routes.public("GET /console", "The console, a page for people", {200: str}, media="text/html")(
    page_file(FOLDER / INDEX, "console", HEADERS)
)
for _name in FILES:
    routes.public(f"GET /console/{_name}")(page_file(FOLDER / _name, "console", HEADERS))


class FrontReply(msgspec.Struct, frozen=True):
    """Name and version of the service, and paths of what describes it."""

    name: str
    version: str
    links: dict[str, str]


@routes.public("GET /", "Name, version and links; browsers are sent to the console", {200: FrontReply})
async def front(request: Request) -> Response:
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("console", status_code=303)
    return json_response(FrontReply("garnish", VERSION, LINKS))
