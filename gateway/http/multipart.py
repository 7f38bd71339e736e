"""Multipart uploads: small fields are kept in memory, and one large part is streamed.

An adapter's weights are written to a temporary file, which is always removed.
"""

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

from adapters.full_disk import is_full
from adapters.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, TEXT_FILES, WEIGHTS_FILE
from adapters.wrong_files import PICKLE_FILE, PICKLE_PROBLEM
from cluster.errors import ServiceError
from gateway.config import GatewayConfig
from gateway.http.bodies import stream_body
from gateway.http.errors import invalid, no_room
from gateway.http.upload_folders import upload_prefix

FLUSH_BYTES = 1 << 20
"""Bytes of weights that are collected before they are written to disk, off the event loop."""
MAX_HEADER_BYTES = 8 << 10
RETRY_AFTER = 5.0

log = logging.getLogger("gateway")


class Form(msgspec.Struct, frozen=True):
    """Expected parts of an upload. `large`: name of the part that is streamed. `limits`: maximum bytes of each other
    part, by name."""

    large: str
    limits: dict[str, int]


ADAPTER = Form(WEIGHTS_FILE, {CONFIG_FILE: MAX_CONFIG_BYTES, "policy": 64 << 10, "alias": 1 << 10, **TEXT_FILES})


class Upload(msgspec.Struct, frozen=True):
    """Upload of an adapter. `weights` is a file that exists only as long as the context of `receive_upload`."""

    config: bytes
    weights: Path
    policy: bytes | None
    alias: bytes | None
    text_files: dict[str, bytes]
    """Files of the tokenizer next to the adapter, by name."""


@asynccontextmanager
async def receive_upload(request: Request, config: GatewayConfig) -> AsyncIterator[Upload]:
    """Receives an adapter's files into a temporary folder, and yields them. Raises ServiceError for a body that is too
    large, too slow, broken, or has other parts than ADAPTER.

    A part is identified by its field name, or else by its file name: `-F adapter_config.json=@FILE` and `-F
    files=@adapter_config.json` are equivalent.
    """
    parts = FormParts(request, ADAPTER)
    with disk_needed():
        folder = tempfile.TemporaryDirectory(
            dir=config.tmp_dir,
            prefix=upload_prefix(),
            ignore_cleanup_errors=True,  # a disk that has become read-only; a later start removes the folder
        )
    with folder:
        weights = Path(folder.name) / WEIGHTS_FILE
        with disk_needed(), weights.open("wb") as out:
            body = stream_body(request, config.deploy_body, config.deploy_seconds, config.body_idle_seconds)
            async with aclosing(body) as chunks:
                async for chunk in chunks:
                    parts.feed(chunk)
                    if len(parts.large) >= FLUSH_BYTES:
                        await asyncio.to_thread(_flush, parts, out)
            parts.end()
            await asyncio.to_thread(_flush, parts, out)
        parts.require(CONFIG_FILE, WEIGHTS_FILE)
        small = {name: bytes(data) for name, data in parts.small.items()}
        text_files = {name: small[name] for name in TEXT_FILES if name in small}
        yield Upload(small[CONFIG_FILE], weights, small.get("policy"), small.get("alias"), text_files)


@contextmanager
def disk_needed() -> Iterator[None]:
    """Logs a full or broken disk, and raises ServiceError `insufficient_storage` or `unavailable` for it."""
    try:
        yield
    except OSError as error:
        log.error("uploads can't be kept on this host's disk", exc_info=error)
        if is_full(error):
            raise no_room("uploads can't be kept, because the gateway's disk is full or read-only") from error
        raise ServiceError("unavailable", "uploads can't be kept now", retry_after=RETRY_AFTER) from error


def _flush(parts: FormParts, out: BufferedWriter) -> None:
    out.write(parts.large)
    parts.large.clear()


def _boundary(request: Request) -> bytes:
    _, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise ServiceError("invalid_request", "the multipart Content-Type states no boundary")
    return boundary


class FormParts:
    """Parser of a multipart body, which sorts the content by part. Methods raise ServiceError for an invalid body."""

    def __init__(self, request: Request, form: Form) -> None:
        self.filenames: dict[str, str] = {}
        """File names of the received parts, by name of the part. A file name is empty if none is stated."""
        self.small: dict[str, bytearray] = {}
        self.large = bytearray()
        """Received bytes of the large part; the caller removes them as it uses them."""
        self._form = form
        self._into = self.large
        self._limit: int | None = None
        self._name = ""
        self._disposition = ""
        self._header = [bytearray(), bytearray()]
        self._ended = False
        try:
            self._parser = MultipartParser(
                _boundary(request),
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

    def require(self, *names: str) -> None:
        """Raises ServiceError unless these parts were received."""
        missing = [name for name in names if name not in self.filenames]
        if missing:
            raise invalid(missing[0], f"the upload lacks {' and '.join(missing)}")

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
        stated = [options.get(key, b"").decode(errors="replace") for key in (b"name", b"filename")]
        parts = (self._form.large, *self._form.limits)
        name = next((text for text in stated if text in parts), None)
        if name is None:
            shown = stated[0][:100]
            if PICKLE_FILE in stated:
                raise invalid(PICKLE_FILE, f"{PICKLE_FILE} is {PICKLE_PROBLEM}")
            raise invalid(shown or None, f"unknown part {shown!r}; known: {', '.join(parts)}")
        if name in self.filenames:
            raise invalid(name, f"the part {name} occurs twice")
        self.filenames[name] = stated[1]
        self._name, self._limit = name, self._form.limits.get(name)
        self._into = self.large if name == self._form.large else self.small.setdefault(name, bytearray())

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
