"""Static files of the gateway's pages. They are a fixed table of files that is read once, so no request's path is used
to open a file."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.http.routing import Endpoint

REVALIDATE, FOREVER = "no-cache", "public, max-age=31536000, immutable"
"""Values of the header Cache-Control. A file whose name contains its version never changes. Other files are revalidated
by ETag."""
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""Content-Security-Policy of all pages, by directive."""
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def page_headers(policy: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of a page's files. `policy`: directives that add to or replace those of POLICY."""
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in {**POLICY, **policy}.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


def page_file(file: Path, name: str, headers: Mapping[str, str], cache: str = REVALIDATE) -> Endpoint:
    """Returns the endpoint that serves one file. `name`: the route in metrics and logs."""
    content, media_type = file.read_bytes(), MEDIA_TYPES[file.suffix]
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    sent = {**headers, "cache-control": cache, "etag": etag}

    async def answer(request: Request) -> Response:
        if file.suffix == ".html" and request.scope.get("raw_path", b"").endswith(b"/"):
            # The page's relative links would begin there.
            return RedirectResponse(f"../{name}", status_code=308)
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=sent)
        return Response(content, headers=sent, media_type=media_type)

    answer.__name__ = name
    return answer
