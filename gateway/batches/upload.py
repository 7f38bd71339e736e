"""Body of POST /v1/files, streamed from the connection to the object store."""

from __future__ import annotations

from contextlib import aclosing, suppress

from starlette.requests import Request

from adapters.errors import StoreUnavailable
from cluster.errors import ServiceError
from cluster.printable import printable
from gateway.batches.files import MAX_FILE_BYTES, PART_BYTES, FileRecord, FileStore, Part
from gateway.catalog.threads import StoreThreads
from gateway.config import GatewayConfig
from gateway.http.bodies import stream_body
from gateway.http.multipart import Form, FormParts

FILE_FORM = Form("file", {"purpose": 100})
MAX_FORM_BYTES = 64 << 10
MAX_FILENAME_CHARACTERS = 200


async def receive_file(
    request: Request, config: GatewayConfig, files: FileStore, threads: StoreThreads, tenant: str, limit: int
) -> FileRecord:
    """Stores the file in a multipart body, and returns the file's record. `limit`: maximum bytes of all files of the
    tenant.

    Raises ServiceError, Conflict. After an error nothing of the file remains.
    """
    form = FormParts(request, FILE_FORM)
    file_id = await threads.write(files.begin, tenant, _size_of(request), limit)
    upload = _Upload(form, files, threads, tenant, file_id)
    try:
        await upload.receive(request, config)
        return await upload.commit()
    except BaseException:
        with suppress(StoreUnavailable):  # then the tenant's later uploads remove it
            await threads.write(files.abandon, tenant, upload.file_id)
        raise


def _size_of(request: Request) -> int:
    """Returns an upper bound of the file's size in bytes: the size of the whole request, at most MAX_FILE_BYTES."""
    stated = request.headers.get("content-length", "")
    return min(int(stated), MAX_FILE_BYTES) if stated.isdecimal() else MAX_FILE_BYTES


class _Upload:
    """Upload in progress."""

    def __init__(self, form: FormParts, files: FileStore, threads: StoreThreads, tenant: str, file_id: str) -> None:
        self.file_id = file_id
        self._form, self._files, self._threads, self._tenant = form, files, threads, tenant
        self._parts: list[Part] = []
        self._bytes = 0

    async def receive(self, request: Request, config: GatewayConfig) -> None:
        limit = MAX_FILE_BYTES + MAX_FORM_BYTES
        body = stream_body(request, limit, config.deploy_seconds, config.body_idle_seconds)
        async with aclosing(body) as chunks:
            async for chunk in chunks:
                self._form.feed(chunk)
                if self._bytes + len(self._form.large) > MAX_FILE_BYTES:
                    raise ServiceError("too_large", f"the file is larger than {MAX_FILE_BYTES} bytes", param="file")
                if len(self._form.large) >= PART_BYTES:
                    await self._store_part()
        self._form.end()
        self._form.require("file", "purpose")
        if self._form.small["purpose"] != b"batch":
            raise ServiceError("validation_failed", "purpose must be batch", param="purpose")
        await self._store_part()

    async def commit(self) -> FileRecord:
        name = printable(self._form.filenames["file"])[:MAX_FILENAME_CHARACTERS] or "file.jsonl"
        now = await self._threads.read(self._files.store.now)
        record = FileRecord(self.file_id, name, "batch", now, tuple(self._parts))
        return await self._threads.write(self._files.commit, self._tenant, record)

    async def _store_part(self) -> None:
        data = bytes(self._form.large)
        self._form.large.clear()
        if data:
            name = f"{len(self._parts):06d}"
            part = await self._threads.write(self._files.put_part, self._tenant, self.file_id, name, data)
            self._parts.append(part)
            self._bytes += part.bytes
