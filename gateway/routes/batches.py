"""Routes /v1/batches: many calls in one file, run in spare capacity."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.batches.messages import Batch, BatchList, BatchRequest
from gateway.batches.pages import Page, page_parameters
from gateway.groups import Calls
from gateway.http.bodies import read_message
from gateway.http.errors import invalid
from gateway.http.rates import READ_MANY
from gateway.http.responses import json_response
from gateway.http.routing import Routes, parameter

routes = Routes(Calls)

MAX_PAGE = 1000
BATCH_ID = parameter("path", "batch_id", "The batch")


@routes.tenant(
    "POST /v1/batches",
    "Run the calls of a file",
    {200: Batch},
    body=BatchRequest,
    errors=(409,),
    limits=("file_bytes", "rps", "tokens_per_minute", "concurrent"),
)
async def create_batch(request: Request, calls: Calls, tenant: str) -> Response:
    body = await read_message(request, calls.config, BatchRequest)
    caller, batches = await calls.callers.caller(request), calls.batches
    source = await calls.threads.read(batches.files.get, tenant, body.input_file_id)
    if source.purpose != "batch":
        raise invalid("input_file_id", "the file's purpose is not batch")
    limit = (await calls.callers.account(tenant)).file_bytes
    await calls.threads.write(batches.files.quota.check, tenant, limit)
    by_admin = caller.tenant is None
    batch = await calls.threads.write(batches.records.create, tenant, body, caller.key_id, by_admin=by_admin)
    batches.runner.wake()
    return json_response(batch.reply())


@routes.tenant(
    "GET /v1/batches",
    "The tenant's batches",
    {200: BatchList},
    parameters=page_parameters(MAX_PAGE),
    rate=READ_MANY,
)
async def list_batches(request: Request, calls: Calls, tenant: str) -> Response:
    page, records = Page.from_request(request, "batch_", default=20, max_limit=MAX_PAGE), calls.batches.records
    ids = page.ids(await calls.threads.read(records.ids, tenant))
    page_records = await calls.threads.read(records.records, tenant, ids[: page.limit])
    shown = [record.reply() for record in page_records]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(BatchList(shown, len(ids) > page.limit, first, last))


@routes.tenant("GET /v1/batches/{batch_id}", "One of them", {200: Batch}, parameters=(BATCH_ID,))
async def get_batch(request: Request, calls: Calls, tenant: str) -> Response:
    batch = await calls.threads.read(calls.batches.records.get, tenant, request.path_params["batch_id"])
    return json_response(batch.reply())


@routes.tenant(
    "POST /v1/batches/{batch_id}/cancel", "Cancel a batch", {200: Batch}, parameters=(BATCH_ID,), errors=(409,)
)
async def cancel_batch(request: Request, calls: Calls, tenant: str) -> Response:
    ended = await calls.threads.write(calls.batches.records.cancel, tenant, request.path_params["batch_id"])
    calls.batches.runner.wake()
    return json_response(ended.reply())
