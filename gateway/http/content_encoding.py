"""Compressed bodies: those of calls may be gzip, which is inflated within the limit of plain bodies."""

from __future__ import annotations

import zlib

from starlette.requests import Request

from cluster.errors import ServiceError

PLAIN = ("", "identity")
GZIP = ("gzip", "x-gzip")
GZIP_FORMAT = 16 + zlib.MAX_WBITS
"""Value of zlib's `wbits` for data in gzip's format."""


class UnknownEncoding(ServiceError):
    """The body has an encoding that the route does not take. `headers`: those of the reply."""

    def __init__(self, stated: str, accepted: str) -> None:
        why = f"content-encoding {stated[:100]} is not accepted here; send the body as {accepted}"
        super().__init__("unsupported_media_type", why)
        self.headers = {"accept-encoding": accepted.replace(" or ", ", ")}


def check_plain(request: Request) -> None:
    """Checks that the body is not compressed. Raises UnknownEncoding."""
    if (stated := _stated(request)) not in PLAIN:
        raise UnknownEncoding(stated, "identity")


def is_gzip(request: Request) -> bool:
    """Returns whether the body is gzip; False if it is not compressed. Raises UnknownEncoding."""
    stated = _stated(request)
    if stated not in (*PLAIN, *GZIP):
        raise UnknownEncoding(stated, "gzip or identity")
    return stated in GZIP


def inflate(data: bytes, limit: int) -> bytes:
    """Returns the content of gzip data. At most `limit + 1` bytes are made of it, whatever it holds.

    Raises ServiceError: `invalid_request` if it is not one complete gzip stream.
    """
    inflater = zlib.decompressobj(GZIP_FORMAT)
    try:
        content = inflater.decompress(data, limit + 1)
    except zlib.error:
        raise ServiceError("invalid_request", "the body is not gzip, as its content-encoding says") from None
    if len(content) <= limit and (not inflater.eof or inflater.unused_data):
        problem = "goes on after its gzip data" if inflater.eof else "ends before its gzip data does"
        raise ServiceError("invalid_request", f"the body {problem}")
    return content


def _stated(request: Request) -> str:
    return ", ".join(request.headers.getlist("content-encoding")).strip().lower()
