"""Deploys of adapters that are already in S3, or in a folder of the gateway's host: their two files are copied from
below a prefix or folder that the operator allows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from adapters.errors import InvalidRequest, StoreUnavailable, TooLarge
from adapters.full_disk import store_error
from adapters.local_sources import SCHEME, LocalCopy, LocalPlace, is_within, parse_folder
from adapters.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, TEXT_FILES, WEIGHTS_FILE
from adapters.s3_url import S3Place, parse_s3_url

if TYPE_CHECKING:
    from adapters.s3_calls import S3Calls, S3Limits


NOT_ALLOWED = "the operator allows no such source to deploy from"


class Forbidden(InvalidRequest):
    """The source is not allowed by the operator, or is not a valid address."""


class SourceFiles(msgspec.Struct, frozen=True):
    """Copied files of an adapter: the content of its config, and the path of its weights."""

    config: bytes
    weights: Path
    text_files: dict[str, bytes] = {}
    """Files of the tokenizer next to the adapter, by name."""


Place = S3Place | LocalPlace


def check_source(url: str) -> None:
    """Checks an address that the operator allows: `s3://bucket/prefix` or `file:///folder`. Raises InvalidRequest."""
    if url.startswith(SCHEME):
        parse_folder(url)
    else:
        parse_s3_url(url)


class Sources:
    """Copies adapters' files from S3 prefixes and folders that the operator allows. Methods may be called from any
    thread. Sends and reads nothing before the first `copy`."""

    def __init__(self, allowed: Sequence[str], limits: S3Limits | None = None) -> None:
        """Creates a copier for the places `allowed`, each `s3://bucket`, `s3://bucket/prefix` or `file:///folder`.
        Raises InvalidRequest for an invalid one."""
        self._folders = [parse_folder(url) for url in allowed if url.startswith(SCHEME)]
        self._allowed = [parse_s3_url(url) for url in allowed if not url.startswith(SCHEME)]
        self._limits = limits
        self._buckets: dict[str, S3Calls] = {}
        self._lock = Lock()

    def place(self, source: str) -> Place:
        """Returns the place of `source`. Raises Forbidden unless it is well-formed and equal to or below an allowed
        prefix or folder, compared by whole segments."""
        if self._folders and source.startswith((SCHEME, "/")):
            return self._local_place(source)
        try:
            place = parse_s3_url(source)
        except InvalidRequest:
            raise Forbidden(
                "source", "a source is s3://bucket/prefix, of letters, digits, '.', '_', '-' and single '/'"
            ) from None
        if not any(_within(place, allowed) for allowed in self._allowed):
            raise Forbidden("source", NOT_ALLOWED)
        return place

    def _local_place(self, source: str) -> LocalPlace:
        try:
            folder = parse_folder(source)
        except InvalidRequest as error:
            raise Forbidden("source", str(error)) from None
        allowed = next((each for each in self._folders if is_within(folder, each)), None)
        if allowed is None:
            raise Forbidden("source", NOT_ALLOWED)
        return LocalPlace(folder, allowed)

    def copy(self, place: Place, folder: Path, *, limit: int, deadline: float, stop: Event) -> SourceFiles:
        """Copies an adapter's two files into `folder`, and returns them. `limit` is the maximum of their total size in
        bytes.

        Stops with StoreUnavailable at `deadline` (monotonic seconds) or when `stop` is set. Raises InvalidRequest (a
        file is missing or unreadable), TooLarge or StoreUnavailable.
        """
        config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
        try:
            copy: _Copy | LocalCopy
            if isinstance(place, LocalPlace):
                copy = LocalCopy(place, limit, deadline, stop)
            else:
                copy = _Copy(self._calls(place.bucket), place, limit, deadline, stop)
            copy.file(config, min(limit, MAX_CONFIG_BYTES))
            copy.file(weights, limit)
            names = [name for name, size in TEXT_FILES.items() if _copy_optional(copy, folder / name, size)]
            return SourceFiles(config.read_bytes(), weights, {name: (folder / name).read_bytes() for name in names})
        except OSError as error:
            raise store_error(error, "temporary files can't be used") from error

    def _calls(self, bucket: str) -> S3Calls:
        from adapters.s3_calls import S3Calls, S3Limits  # imported late: few gateways need boto3

        with self._lock:
            if bucket not in self._buckets:
                self._buckets[bucket] = S3Calls(bucket, self._limits or S3Limits())
            return self._buckets[bucket]


class _Copy:
    """A source that is being copied. `remaining_bytes` is the number of bytes that may still be copied."""

    def __init__(self, calls: S3Calls, place: S3Place, limit: int, deadline: float, stop: Event) -> None:
        self._calls = calls
        self._place = place
        self._deadline = deadline
        self._stop = stop
        self._limit = limit
        self.remaining_bytes = limit

    def file(self, target: Path, limit: int) -> None:
        """Copies the source's file that has the name of `target` to `target`. The copy is complete, and from a single
        version of the file."""
        from adapters.s3_calls import Refused

        name = target.name
        try:
            with target.open("wb") as out:
                self._pieces(name, min(limit, self.remaining_bytes), out)
        except Refused as refused:
            problems = {
                404: f"there is no {name} in the source, or it is not shown to this service",
                403: f"this service may not read {name} in the source",
                412: f"{name} was rewritten while it was copied",
                416: f"{name} in the source is empty",
            }
            problem = problems.get(refused.status)
            if problem is None:
                raise StoreUnavailable(f"the source answered {refused}") from refused
            raise InvalidRequest("source", problem) from None

    def _pieces(self, name: str, limit: int, out: BinaryIO) -> None:
        from adapters.s3_ranges import read_piece

        key = f"{self._place.prefix}/{name}" if self._place.prefix else name
        buffer = memoryview(bytearray(self._calls.limits.part))
        start, total, tag = 0, 1, ""
        while start < total:
            if self._stop.is_set() or time.monotonic() > self._deadline:
                raise StoreUnavailable("the source was not copied in time")
            piece = read_piece(self._calls, {"Bucket": self._place.bucket, "Key": key}, start, buffer, tag, READABLE)
            if piece.total > limit:
                raise TooLarge(f"{name} in the source has {piece.total} bytes, {limit} are allowed", self._limit)
            out.write(buffer[: piece.length])
            start, total, tag = start + piece.length, piece.total, piece.etag
        self.remaining_bytes -= total


def _copy_optional(copy: _Copy | LocalCopy, target: Path, limit: int) -> bool:
    """Copies a file that the source may lack. Returns whether it has one that is not too large."""
    try:
        copy.file(target, limit)
    except (InvalidRequest, TooLarge):
        return False
    return True


READABLE = (403, 404, 412, 416)
"""HTTP statuses that are about the file rather than the request."""


def _within(place: S3Place, allowed: S3Place) -> bool:
    if place.bucket != allowed.bucket:
        return False
    return not allowed.prefix or f"{place.prefix}/".startswith(f"{allowed.prefix}/")
