"""Routes /v1/files: inputs and outputs of batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from adapters.errors import NotFound
from cluster.errors import ServiceError
from gateway.batches.files import READ_BYTES, FileRecord, piece_starts
from gateway.batches.messages import FileDeleted, FileList, FileObject
from gateway.batches.pages import Page, page_parameters
from gateway.batches.upload import receive_file
from gateway.groups import Calls
from gateway.http.bodies import media_type
from gateway.http.errors import invalid
from gateway.http.rates import READ_MANY, RouteRate
from gateway.http.responses import json_response
from gateway.http.routing import Routes, parameter, take_rate

routes = Routes(Calls)

FILE_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": "batch"},
    },
}
MAX_PAGE = 10_000
"""Maximum entries of a page, as in OpenAI's API; a tenant has far fewer files."""
PURPOSES = ("batch", "batch_output")
FILE_ID = parameter("path", "file_id", "The file")


@routes.tenant(
    "POST /v1/files",
    "Upload the calls of a batch",
    {200: FileObject},
    multipart=FILE_FORM,
    errors=(409, 413, 415),
    limits=("file_bytes",),
)
async def create_file(request: Request, calls: Calls, tenant: str) -> Response:
    if media_type(request) != "multipart/form-data":
        raise ServiceError("unsupported_media_type", "send multipart/form-data with `file` and `purpose`")
    files, limit = calls.batches.files, (await calls.callers.account(tenant)).file_bytes
    with calls.pools["batch_files"].hold_now(tenant):
        record = await receive_file(request, calls.config, files, calls.threads, tenant, limit)
    await _check_tenant(calls, tenant, record)
    return json_response(record.reply())


@routes.tenant(
    "GET /v1/files",
    "The tenant's files",
    {200: FileList},
    parameters=(*page_parameters(MAX_PAGE), parameter("query", "purpose", "Only those of this purpose")),
    rate=READ_MANY,
)
async def list_files(request: Request, calls: Calls, tenant: str) -> Response:
    page, purpose = (
        Page.from_request(request, "file-", default=MAX_PAGE, max_limit=MAX_PAGE),
        request.query_params.get("purpose"),
    )
    if purpose not in (None, *PURPOSES):
        raise invalid("purpose", f"purpose must be one of {', '.join(PURPOSES)}")
    files = calls.batches.files
    ids = page.ids(await calls.threads.read(files.ids, tenant))
    records = await calls.threads.read(files.records, tenant, ids if purpose else ids[: page.limit + 1])
    replies = [record.reply() for record in records if purpose in (None, record.purpose)]
    shown = replies[: page.limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(FileList(shown, len(replies) > page.limit, first, last))


@routes.tenant("GET /v1/files/{file_id}", "One of them", {200: FileObject}, parameters=(FILE_ID,))
async def get_file(request: Request, calls: Calls, tenant: str) -> Response:
    return json_response((await _record(request, calls, tenant)).reply())


@routes.tenant("GET /v1/files/{file_id}/content", "Its content", {200: bytes}, parameters=(FILE_ID,))
async def get_file_content(request: Request, calls: Calls, tenant: str) -> Response:
    record = await _record(request, calls, tenant)
    if pieces := record.bytes // READ_BYTES:  # each is one more read of the store
        await take_rate(request, tenant, RouteRate("reads_per_second", pieces))
    headers = {"content-length": str(record.bytes), "x-content-type-options": "nosniff"}
    content = _content(calls, tenant, record)
    first = await anext(content, b"")  # before the headers, so that a store that is away is answered 503
    return StreamingResponse(_joined(first, content), headers=headers, media_type="application/octet-stream")


@routes.tenant("DELETE /v1/files/{file_id}", "Delete a file", {200: FileDeleted}, parameters=(FILE_ID,))
async def delete_file(request: Request, calls: Calls, tenant: str) -> Response:
    file_id = request.path_params["file_id"]
    await calls.threads.write(calls.batches.files.delete, tenant, file_id)
    return json_response(FileDeleted(file_id))


async def _check_tenant(calls: Calls, tenant: str, record: FileRecord) -> None:
    """Removes the file if its tenant was deleted during the upload, and then raises NotFound.

    If the file stayed, a new tenant of the same name would see it.
    """
    try:
        await calls.callers.account(tenant)
    except NotFound:
        await calls.threads.write(calls.batches.files.abandon, tenant, record.id)
        await calls.threads.write(calls.batches.files.quota.forget, tenant)
        raise


async def _record(request: Request, calls: Calls, tenant: str) -> FileRecord:
    return await calls.threads.read(calls.batches.files.get, tenant, request.path_params["file_id"])


async def _joined(first: bytes, content: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(content):
        yield first
        async for piece in content:
            yield piece


async def _content(calls: Calls, tenant: str, record: FileRecord) -> AsyncGenerator[bytes, None]:
    for start, length in piece_starts(record.bytes):
        yield await calls.threads.read(calls.batches.files.read, tenant, record, start, length)
