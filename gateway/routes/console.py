"""GET /console: a web page that shows the service. The page itself needs no key.

It reads its data with the key that the user types into it, through the public routes.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from adapters.errors import NotFound
from gateway.http.page_files import page_file, page_headers
from gateway.http.routing import Routes

routes: Routes[None] = Routes()

FOLDER = Path(__file__).parents[1] / "console"
# Trusted Types keep scripts from turning text into markup.
HEADERS = page_headers({"require-trusted-types-for": "'script'", "trusted-types": "'none'"})
INDEX = "index.html"
FILES = sorted(file.name for file in FOLDER.iterdir() if file.suffix in (".css", ".js"))

routes.public("GET /console", "The console, a page for people", {200: str}, media="text/html")(
    page_file(FOLDER / INDEX, "console", HEADERS)
)
for _name in FILES:
    routes.public(f"GET /console/{_name}")(page_file(FOLDER / _name, "console", HEADERS))


@routes.public("GET /")
async def front(request: Request) -> Response:
    """Redirects browsers to the console. Raises NotFound for other clients."""
    if "text/html" not in request.headers.get("accept", ""):
        raise NotFound("no such route")
    return RedirectResponse("console", status_code=303)
