"""Multipart uploads of an adapter: small fields in memory, the weights in a temporary file that always goes away."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from io import BufferedWriter
from pathlib import Path

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from adapters.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from adapters.wrong_files import PICKLE_FILE, PICKLE_PROBLEM
from cluster.errors import ServiceError
from gateway.http.bodies import stream_body
from gateway.http.upload_folders import upload_prefix

FIELD_LIMITS = {CONFIG_FILE: MAX_CONFIG_BYTES, "policy": 64 << 10, "alias": 1 << 10}
"""Bytes of the parts that are kept in memory."""
FIELDS = (CONFIG_FILE, WEIGHTS_FILE, "policy", "alias")
FLUSH_BYTES = 1 << 20
"""Weights are written to disk, off the event loop, in pieces of this size."""
MAX_HEADER_BYTES = 8 << 10
RETRY_AFTER = 5.0

log = logging.getLogger("gateway")


class Upload(msgspec.Struct, frozen=True):
    """`weights` is a file that exists only inside `receive_upload`."""

    config: bytes
    weights: Path
    policy: bytes | None
    alias: bytes | None


@asynccontextmanager
async def receive_upload(
    request: Request, folder: Path, *, limit: int, seconds: float, idle_seconds: float
) -> AsyncIterator[Upload]:
    """Raises ServiceError for a body that is too large, too slow, broken, or not made of the parts in FIELDS.

    A part is known by its field name, or else by its file name: both `-F adapter_config.json=@FILE` and
    `-F files=@adapter_config.json` do.
    """
    parts = _Parts(_boundary(request))
    with disk_needed():
        own = tempfile.TemporaryDirectory(dir=folder, prefix=upload_prefix())
    with own:
        weights = Path(own.name) / WEIGHTS_FILE
        with disk_needed(), weights.open("wb") as out:
            async with aclosing(stream_body(request, limit, seconds, idle_seconds)) as chunks:
                async for chunk in chunks:
                    parts.feed(chunk)
                    if len(parts.weights) >= FLUSH_BYTES:
                        await asyncio.to_thread(_flush, parts, out)
            parts.end()
            await asyncio.to_thread(_flush, parts, out)
        missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if name not in parts.seen]
        if missing:
            raise ServiceError("validation_failed", f"the upload lacks {' and '.join(missing)}", param=missing[0])
        small = {name: bytes(data) for name, data in parts.small.items()}
        yield Upload(small[CONFIG_FILE], weights, small.get("policy"), small.get("alias"))


@contextmanager
def disk_needed() -> Iterator[None]:
    """A full or broken disk is told as what it is, in the log with its reason. Raises ServiceError `unavailable`."""
    try:
        yield
    except OSError as error:
        log.error("uploads can't be kept on this host's disk", exc_info=error)
        raise ServiceError("unavailable", "uploads can't be kept now", retry_after=RETRY_AFTER) from error


def _flush(parts: _Parts, out: BufferedWriter) -> None:
    out.write(parts.weights)
    parts.weights.clear()


def _boundary(request: Request) -> bytes:
    _, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise ServiceError("invalid_request", "the multipart Content-Type states no boundary")
    return boundary


class _Parts:
    """Callbacks of the parser: sorts the parts' bytes by name."""

    def __init__(self, boundary: bytes) -> None:
        self.seen: set[str] = set()
        self.small: dict[str, bytearray] = {}
        self.weights = bytearray()
        self._into = self.weights
        self._limit: int | None = None
        self._name = ""
        self._disposition = ""
        self._header = [bytearray(), bytearray()]
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_part_data": self._on_part_data,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_end": self._on_end,
                },
                max_header_count=8,
                max_header_size=MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise _broken(error) from error

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _broken(error) from error

    def end(self) -> None:
        if not self._ended:
            raise ServiceError("invalid_request", "the multipart body is broken: it ends before its last boundary")

    def _on_part_begin(self) -> None:
        self._disposition = ""
        self._header = [bytearray(), bytearray()]

    def _on_header_end(self) -> None:
        field, value = self._header
        if bytes(field).lower() == b"content-disposition":
            self._disposition = bytes(value).decode("latin-1")
        self._header = [bytearray(), bytearray()]

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        given = [options.get(key, b"").decode("latin-1") for key in (b"name", b"filename")]
        name = next((text for text in given if text in FIELDS), None)
        if name is None:
            shown = given[0][:100]
            if PICKLE_FILE in given:
                raise ServiceError("validation_failed", f"{PICKLE_FILE} is {PICKLE_PROBLEM}", param=PICKLE_FILE)
            raise ServiceError(
                "validation_failed", f"unknown part {shown!r}; known: {', '.join(FIELDS)}", param=shown or None
            )
        if name in self.seen:
            raise ServiceError("validation_failed", f"the part {name} occurs twice", param=name)
        self.seen.add(name)
        self._name, self._limit = name, FIELD_LIMITS.get(name)
        self._into = self.weights if name == WEIGHTS_FILE else self.small.setdefault(name, bytearray())

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._into += data[start:end]
        if self._limit is not None and len(self._into) > self._limit:
            raise ServiceError(
                "too_large", f"the part {self._name} is larger than {self._limit} bytes", param=self._name
            )

    def _on_end(self) -> None:
        self._ended = True


def _broken(error: FormParserError) -> ServiceError:
    return ServiceError("invalid_request", f"the multipart body is broken: {str(error)[:200]}")
