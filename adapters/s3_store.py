"""ObjectStore in an S3 bucket, with conditional writes, ranged reads and listings by boto3 in the caller's thread.

Each write carries a `write-id` as metadata. When S3 refuses the condition of a write, the object is checked: if it has
the same id, an earlier attempt of this write succeeded and its reply was lost.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from adapters.errors import AdapterError, Conflict, InvalidRequest, NotFound, PreconditionFailed, StoreUnavailable
from adapters.s3_calls import Refused, S3Calls, S3Limits, read_body
from adapters.s3_ranges import read_range
from adapters.s3_removal import await_removals, remove_older
from adapters.s3_upload import read_slice, size_of, upload
from adapters.s3_url import S3Place
from adapters.store import MAX_KEY, MAX_LIST, Arrived, Object, ObjectInfo, check_key, is_key

TRANSFERS = 8
"""Maximum number of parts and pieces in flight, over all callers of a store. Their memory is at most this number times
`S3Limits.part`."""
WRITE_ID = "write-id"
_ETAG = re.compile(r"[!#-~]{1,200}", re.ASCII)
_LAST = "~"
"""Character that sorts after every character of a key."""


class S3Store:
    """ObjectStore whose objects are `prefix/key` in one bucket. Etags are those of S3, without quotes.

    The ETag of an object in one part is the content's MD5, unless the bucket encrypts with KMS keys. With KMS keys or
    several parts, rewriting the same content may change the etag. A racing put_if_match then fails once without need.
    """

    readers = 16

    def __init__(self, place: S3Place, limits: S3Limits | None = None) -> None:
        """Creates a store without sending anything to the bucket. Raises StoreUnavailable when boto3's configuration is
        unusable."""
        self.place = place
        self._limits = limits or S3Limits()
        self.calls = S3Calls(place.bucket, self._limits)
        self.pool = ThreadPoolExecutor(TRANSFERS, "s3")

    @property
    def _root(self) -> str:
        return self.place.prefix + "/" if self.place.prefix else ""

    def now(self) -> float:
        """Returns the Unix time by S3's clock, with a resolution of one second."""
        return self.calls.server_time()

    def get(self, key: str) -> Object:
        deadline, target = self.calls.deadline(), self.target(key)

        def read(client: Any) -> Object:
            reply = client.get_object(**target)
            data = bytearray(reply["ContentLength"])
            read_body(reply, memoryview(data), deadline)
            return Object(data=bytes(data), etag=reply["ETag"].strip('"'))

        try:
            return self.calls.run(read, deadline)
        except Refused as refused:
            raise _absent(key, refused) from None

    def head(self, key: str) -> ObjectInfo | None:
        reply = self._head(key)
        if reply is None:
            return None
        return ObjectInfo(key=key, size=reply["ContentLength"], modified=reply["LastModified"].timestamp())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = bytearray(length)
        count = self.get_range_into(key, start, memoryview(data))
        return bytes(memoryview(data)[:count])

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        """Fills `buffer` like `ObjectStore.get_range_into`. Ranges larger than `S3Limits.part` are read in parallel
        pieces, all of the same content."""
        target = self.target(key)
        if not buffer.nbytes:
            if self.head(key) is None:
                raise NotFound(f"there is no object {key}")
            return 0
        try:
            return read_range(self.calls, self.pool, target, start, buffer.cast("B"), arrived)
        except Refused as refused:
            raise _absent(key, refused) from None

    def put(self, key: str, data: bytes | Path) -> str:
        return self._write(key, data, {}, StoreUnavailable(f"S3 saw a condition where {key} was written without one"))

    def put_if_absent(self, key: str, data: bytes | Path) -> str:
        exists = Conflict(f"{key} exists already")
        if size_of(data) > self._limits.part and self.head(key) is not None:
            raise exists  # spares the upload of a large blob; the condition decides
        return self._write(key, data, {"IfNoneMatch": "*"}, exists)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        changed = PreconditionFailed(f"{key} was changed by another writer, or does not exist any more")
        self.target(key)
        if not _ETAG.fullmatch(etag):
            raise changed
        return self._write(key, data, {"IfMatch": f'"{etag}"'}, changed)

    def list(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[ObjectInfo]:
        infos = (
            ObjectInfo(key=key, size=entry["Size"], modified=entry["LastModified"].timestamp())
            for page in self._pages(prefix, after, limit)
            for entry in page.get("Contents", ())
            # objects of other programs in the bucket are not listed
            if (key := entry["Key"].removeprefix(self._root)) > after and is_key(key)
        )
        return tuple(islice(infos, min(limit, MAX_LIST)))

    def folders(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[str]:
        past = after and after + "/"
        names = (
            name[:-1]
            for page in self._pages(prefix, past and prefix + past + _LAST, limit, Delimiter="/")
            for entry in page.get("CommonPrefixes", ())
            if (name := entry["Prefix"].removeprefix(self._root + prefix)) > past and is_key(name[:-1])
        )
        return tuple(islice(names, min(limit, MAX_LIST)))

    def delete(self, key: str) -> None:
        target = self.target(key)
        try:
            self.calls.run(lambda client: client.delete_object(**target), self.calls.deadline())
        except Refused as refused:
            if refused.status != 404:
                raise _unexpected(refused) from refused

    def delete_older(self, key: str, before: float) -> bool:
        return remove_older(self, key, before)

    def missing(self, keys: Sequence[str]) -> Sequence[str]:
        await_removals(self, keys)
        return [key for key in keys if self.head(key) is None]

    def target(self, key: str) -> dict[str, str]:
        """Returns the bucket and the full key of `key`, as arguments of boto3's calls. Raises InvalidRequest."""
        check_key(key)
        if len(self._root) + len(key) > MAX_KEY:
            raise InvalidRequest("key", f"object key {key[:200]!r} is too long below the prefix {self.place.prefix!r}")
        return {"Bucket": self.place.bucket, "Key": self._root + key}

    def _head(self, key: str) -> Any:
        """Returns S3's reply; None if the object does not exist. Since a missing bucket gives the same 404, the bucket
        is checked too; StoreUnavailable is raised if it is missing."""
        target = self.target(key)
        try:
            return self.calls.run(lambda client: client.head_object(**target), self.calls.deadline())
        except Refused as refused:
            if refused.status != 404:
                raise _unexpected(refused) from refused
        try:
            self.calls.run(lambda client: client.head_bucket(Bucket=self.place.bucket), self.calls.deadline())
        except Refused as refused:
            raise StoreUnavailable(f"there is no bucket {self.place.bucket}") from refused
        return None

    def _write(self, key: str, data: bytes | Path, condition: dict[str, str], lost: AdapterError) -> str:
        """Writes the object under a condition, and returns its etag. Raises `lost` if the condition is certainly not
        met."""
        target, size = self.target(key), size_of(data)
        write_id = uuid.uuid4().hex
        metadata = {WRITE_ID: write_id}
        try:
            if size > self._limits.part:
                return upload(self.calls, self.pool, target["Key"], data, metadata, condition).strip('"')
            return self._put(target, read_slice(data, 0, size), metadata, condition)
        except Refused as refused:
            reply = self._head(key)
            if reply is not None and reply["Metadata"].get(WRITE_ID) == write_id:
                return str(reply["ETag"]).strip('"')
            if refused.code == "NoSuchUpload":
                raise StoreUnavailable(f"the upload of {key} was ended by another client") from refused
            if refused.doubt:  # this write may have succeeded, and been replaced since
                raise StoreUnavailable(f"it is unknown whether {key} was written: a reply of S3 was lost") from refused
            raise lost from None

    def _put(self, target: dict[str, str], body: Any, metadata: dict[str, str], condition: dict[str, str]) -> str:
        def send(client: Any) -> str:
            body.seek(0)
            reply = client.put_object(**target, **condition, Metadata=metadata, Body=body)
            return str(reply["ETag"]).strip('"')

        return self.calls.run(send, self.calls.deadline(body.getbuffer().nbytes))

    def _pages(self, prefix: str, after: str, limit: int, **options: str) -> Iterator[dict[str, Any]]:
        deadline = self.calls.deadline()
        options |= {"Bucket": self.place.bucket, "Prefix": self._root + prefix}
        options |= {"StartAfter": self._root + after} if after else {}
        size = max(1, min(limit, MAX_LIST))
        while time.monotonic() < deadline:
            page = self.calls.run(lambda client: client.list_objects_v2(**options, MaxKeys=size), deadline)
            yield page
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]
        raise StoreUnavailable(f"bucket {self.place.bucket} took too long to list")


def _absent(key: str, refused: Refused) -> AdapterError:
    return NotFound(f"there is no object {key}") if refused.status == 404 else _unexpected(refused)


def _unexpected(refused: Refused) -> StoreUnavailable:
    return StoreUnavailable(f"S3 gave an answer that does not fit the request: {refused}")
