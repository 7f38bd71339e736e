"""GET /openapi.json: the contract as a document; no key needed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.openapi import render
from gateway.http.params import known_only
from gateway.http.routing import ExactRoute

_DOCUMENT = render()


async def openapi(request: Request) -> Response:
    known_only(request)
    return Response(_DOCUMENT, media_type="application/json")


routes = [ExactRoute("/openapi.json", openapi, methods=["GET"])]
