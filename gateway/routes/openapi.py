"""GET /openapi.json: the contract as a document; no key needed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.openapi import render

_DOCUMENT = render()


async def openapi(_: Request) -> Response:
    return Response(_DOCUMENT, media_type="application/json")


routes = [Route("/openapi.json", openapi, methods=["GET"])]
