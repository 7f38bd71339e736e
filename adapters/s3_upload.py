"""Multipart uploads to S3: all or nothing, and a failed write leaves no parts."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from adapters.errors import StoreUnavailable
from adapters.s3_calls import ANSWERS, Refused, S3Calls

RESTARTS = 3
COMPLETE_BYTES = 64 << 20
"""Size in bytes from which the deadline for completing an upload is computed, as if these bytes were transferred."""

log = logging.getLogger(__name__)


def size_of(data: bytes | Path) -> int:
    """Returns the size of `data` in bytes. Raises StoreUnavailable when the file can't be read."""
    if isinstance(data, bytes):
        return len(data)
    try:
        return data.stat().st_size
    except OSError as error:
        raise _unreadable(error) from error


def read_slice(data: bytes | Path, start: int, length: int) -> io.BytesIO:
    """Returns `length` bytes of `data` from `start` as a request body. It is a stream, so it is sent in small blocks,
    each with its own timeout. Raises StoreUnavailable when the file can't be read."""
    if isinstance(data, bytes):
        return io.BytesIO(data[start : start + length])
    try:
        with data.open("rb") as stream:
            return io.BytesIO(os.pread(stream.fileno(), length, start))
    except OSError as error:
        raise _unreadable(error) from error


def upload(
    calls: S3Calls, pool: Executor, name: str, data: bytes | Path, metadata: dict[str, str], condition: dict[str, str]
) -> str:
    """Writes the object `name` (its full key) in parts, and returns its ETag as S3 writes it.

    Raises Refused (412: the condition; 404: the upload is gone, because an earlier attempt completed it or another
    client aborted it) or StoreUnavailable.
    """
    for _ in range(RESTARTS):
        created = calls.run(
            lambda client: client.create_multipart_upload(Bucket=calls.bucket, Key=name, Metadata=metadata),
            calls.deadline(),
        )
        target = {"Bucket": calls.bucket, "Key": name, "UploadId": created["UploadId"]}
        try:
            parts = _send_parts(calls, pool, target, data)
            return _complete(calls, target, parts, condition)
        except BaseException as error:
            _abort(calls, target)
            # 409: another write of this key came between. S3 requires a new upload with all parts.
            if not isinstance(error, Refused) or error.status != 409:
                raise
    raise StoreUnavailable(f"other writes of the same object came between {RESTARTS} uploads")


def _send_parts(calls: S3Calls, pool: Executor, target: dict[str, str], data: bytes | Path) -> list[dict[str, Any]]:
    size = calls.limits.part
    starts = range(0, size_of(data), size)
    return gather(
        pool, [partial(_send_part, calls, target, data, start, index + 1) for index, start in enumerate(starts)]
    )


def _send_part(calls: S3Calls, target: dict[str, str], data: bytes | Path, start: int, number: int) -> dict[str, Any]:
    body = read_slice(data, start, calls.limits.part)

    def send(client: Any) -> Any:
        body.seek(0)
        return client.upload_part(**target, PartNumber=number, Body=body)

    reply = calls.run(send, calls.deadline(body.getbuffer().nbytes))
    sums = {field: value for field, value in reply.items() if field.startswith("Checksum")}
    return {"PartNumber": number, "ETag": reply["ETag"], **sums}


def _complete(calls: S3Calls, target: dict[str, str], parts: list[dict[str, Any]], condition: dict[str, str]) -> str:
    reply = calls.run(
        lambda client: client.complete_multipart_upload(**target, MultipartUpload={"Parts": parts}, **condition),
        calls.deadline(COMPLETE_BYTES),
        answers=(*ANSWERS, 409),
    )
    return str(reply["ETag"])


def _abort(calls: S3Calls, target: dict[str, str]) -> None:
    """Aborts the upload, which frees its parts. A failure here is only logged, since the earlier failure matters more
    to the caller."""
    try:
        calls.run(lambda client: client.abort_multipart_upload(**target), calls.deadline())
    except Refused:
        pass  # the upload has already ended
    except StoreUnavailable as error:
        log.warning("parts of an upload may remain", extra={"object": target["Key"], "problem": str(error)})


def gather(pool: Executor, works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of `works` in order, run by `pool`. When one fails, the others are cancelled or awaited
    before the failure is raised."""
    futures: list[Future[Any]] = []
    try:
        futures.extend(pool.submit(work) for work in works)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def _unreadable(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"the file to be stored can't be read ({error.strerror or 'I/O error'})")
