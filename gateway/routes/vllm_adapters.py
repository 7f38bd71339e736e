"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's routes, by which training loops push adapters.

A load deploys a version of the function `lora_name`, with the tenant's key, from a place that the operator allows.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from adapters.errors import InvalidRequest, NoSuchFunction
from cluster.errors import ServiceError
from gateway.catalog.source_copy import allowed_place
from gateway.groups import Catalog
from gateway.http.bodies import read_message
from gateway.http.errors import invalid
from gateway.http.routing import Routes
from gateway.routes.deploy import DeploySource, check_name, deploy_from

routes = Routes(Catalog)

LoraName = Annotated[str, Meta(min_length=1, max_length=512)]


class LoadAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adapter to deploy as a version of the function `lora_name`."""

    lora_name: LoraName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Place of the adapter's two files, in or below one that the operator allows (`gateway.allowed_sources`):
    `s3://bucket/prefix`, or a folder of the gateway's host."""
    load_inplace: bool | None = None
    """True: if there is the function, this is its next version. Otherwise that is an error, as in vLLM."""
    base_model_name: str | None = None
    """The base model's id, or a path that ends in it; empty: not stated."""
    is_3d_lora_weight: Literal[False] | None = None


class UnloadAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Function to delete, with all its versions."""

    lora_name: LoraName
    lora_int_id: int | None = None
    """Accepted without an effect."""


@routes.tenant(
    "POST /v1/load_lora_adapter",
    "Deploy an adapter in an allowed place, in vLLM's form",
    {200: str},
    body=LoadAdapterRequest,
    errors=(404, 409, 499, 504),
    limits=("adapters", "bytes"),
)
async def load_lora_adapter(request: Request, catalog: Catalog, tenant: str) -> Response:
    body = await read_message(request, catalog.config, LoadAdapterRequest)
    name = body.lora_name
    check_name(name, "lora_name")
    if body.base_model_name and _last_part(body.base_model_name) != _last_part(catalog.base.id):
        raise invalid("base_model_name", f"this service serves {catalog.base.id}")
    place = allowed_place(catalog.sources, body.lora_path, "lora_path")
    if not body.load_inplace and await _exists(catalog, tenant, name):
        why = "has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
        raise invalid("lora_name", f"The lora adapter '{name}' {why}")
    try:
        await deploy_from(catalog, request, tenant, name, place, DeploySource(body.lora_path))
    except InvalidRequest as error:
        raise invalid("lora_path" if error.param == "source" else error.param, str(error)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@routes.tenant(
    "POST /v1/unload_lora_adapter",
    "Delete a function, in vLLM's form",
    {200: str},
    body=UnloadAdapterRequest,
    errors=(404,),
)
async def unload_lora_adapter(request: Request, catalog: Catalog, tenant: str) -> Response:
    body = await read_message(request, catalog.config, UnloadAdapterRequest)
    try:
        await catalog.functions.change(catalog.registry.delete_function, tenant, body.lora_name, None)
    except NoSuchFunction:
        why = f"The lora adapter '{body.lora_name[:100]}' cannot be found."
        raise ServiceError("not_found", why, param="lora_name", openai_code="model_not_found") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].casefold()


async def _exists(catalog: Catalog, tenant: str, name: str) -> bool:
    try:
        await catalog.threads.read(catalog.registry.function, tenant, name)
    except NoSuchFunction:
        return False
    return True
