"""Routes /nodes: nodes as the scheduler sees them, their adapters, and draining. Admin keys only."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from adapters.artifact import artifact_key
from adapters.errors import NotFound
from cluster.errors import ServiceError
from cluster.gpu import GpuLoad, throttle_reasons
from cluster.messages import Adapter
from cluster.news import NodeRecord, NodeReport
from cluster.node_book import NodeView
from cluster.record_check import BadRecord
from cluster.residency import (
    AdapterState,
    AdapterStates,
    EvictOrder,
    HeldTier,
    LayerName,
    Moved,
    PrefetchOrder,
)
from gateway.catalog.adapters import adapter_of
from gateway.groups import Nodes
from gateway.http.bodies import read_message
from gateway.http.errors import invalid
from gateway.http.responses import json_response
from gateway.http.routing import TENANT, Routes, parameter
from gateway.routes.cluster import take_news

routes = Routes(Nodes)
_NODE = parameter("path", "id", "The node, as GET /nodes names it")
_TENANT = {**TENANT, "description": "Whose function is meant"}
NODE_ERRORS = (502, 504)


class NodeItem(msgspec.Struct, frozen=True):
    """A node as the scheduler sees it. `record` is the latest report of the node, which arrived `age` seconds ago.
    `reserved` is the number of places reserved for requests that this record does not include yet. `circuit` is `open`
    if the gateway worker that answers can't reach the node. It is `half_open` while a single request may test the
    connection."""

    record: dict[str, Any]
    reserved: int
    age: float
    circuit: Literal["closed", "open", "half_open"]


class NodeList(msgspec.Struct, frozen=True):
    nodes: list[NodeItem]


class AdapterRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reference to an adapter, by exactly one of `function` and `digest`. `function` is `name`, `name:alias` or
    `name:version`, and belongs to the tenant in the header `x-garnish-tenant`. `digest` is the digest of a version's
    adapter."""

    function: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)] | None = None


class NodeAdapter(msgspec.Struct, frozen=True):
    """An adapter on a node, with its tier and its use."""

    digest: str
    tier: HeldTier
    """Fastest tier that contains the complete adapter; `absent`: it is being fetched from the registry."""
    bytes: int
    ranks: list[int]
    in_use: int
    waiting: int
    layers: list[LayerName] | None


class NodeAdapters(msgspec.Struct, frozen=True):
    node: str
    adapters: list[NodeAdapter]
    unnamed: int
    """Number of further adapters on the node, which are not listed. They are on disk only."""


class MovedReply(msgspec.Struct, frozen=True):
    """Result of a prefetch or an eviction. `tier` is the adapter's tier now; null while its load continues."""

    node: str
    digest: str
    tier: HeldTier | None


@routes.admin("GET /nodes", "The nodes as the scheduler sees them", {200: NodeList})
async def list_nodes(_: Request, nodes: Nodes) -> Response:
    return json_response(NodeList(nodes=[_item(nodes, node) for node in await nodes.cluster.nodes()]))


@routes.admin(
    "GET /nodes/{id}/adapters",
    "The adapters on a node: tiers, and layer by layer while they load",
    {200: NodeAdapters},
    parameters=(_NODE,),
    errors=NODE_ERRORS,
)
async def list_node_adapters(request: Request, nodes: Nodes) -> Response:
    node = await _node(nodes, request)
    _, states = await nodes.node_calls.ask(node, "/adapters", AdapterStates)
    listed = [_adapter(state) for state in states.adapters]
    return json_response(NodeAdapters(node=node.id, adapters=listed, unnamed=states.unnamed))


@routes.admin(
    "POST /nodes/{id}/prefetch",
    "Bring an adapter to a node's device, or to its host memory if the device is in use",
    {200: MovedReply, 202: MovedReply},
    parameters=(_NODE, _TENANT),
    body=AdapterRef,
    errors=(409, *NODE_ERRORS),
)
async def prefetch(request: Request, nodes: Nodes) -> Response:
    adapter = await _adapter_named(nodes, request, await _ref(nodes, request))
    node = await _node(nodes, request)
    status, moved = await nodes.node_calls.ask(node, "/adapters/prefetch", Moved, PrefetchOrder(adapter))
    return _moved(node, moved, status)


@routes.admin(
    "POST /nodes/{id}/evict",
    "Take an adapter off a node's device, host memory and disk; 409 while it is in use",
    {200: MovedReply},
    parameters=(_NODE, _TENANT),
    body=AdapterRef,
    errors=(409, *NODE_ERRORS),
)
async def evict(request: Request, nodes: Nodes) -> Response:
    ref = await _ref(nodes, request)
    digest = ref.digest or (await _adapter_named(nodes, request, ref)).digest
    node = await _node(nodes, request)
    status, moved = await nodes.node_calls.ask(node, "/adapters/evict", Moved, EvictOrder(digest))
    return _moved(node, moved, status)


@routes.admin(
    "POST /nodes/{id}/drain",
    "Give a node no new requests; running ones end",
    {200: NodeItem},
    parameters=(_NODE,),
    errors=NODE_ERRORS,
)
async def drain_node(request: Request, nodes: Nodes) -> Response:
    return await _set_draining(request, nodes, "/drain")


@routes.admin(
    "POST /nodes/{id}/undrain", "Give it requests again", {200: NodeItem}, parameters=(_NODE,), errors=NODE_ERRORS
)
async def undrain_node(request: Request, nodes: Nodes) -> Response:
    return await _set_draining(request, nodes, "/undrain")


async def _set_draining(request: Request, nodes: Nodes, path: str) -> Response:
    """Starts or ends the draining of a node. Returns a response with the node's new state.

    The node itself refuses calls from then on. Its new record is published here, so that no call is sent to it and
    refused.
    """
    node = await _node(nodes, request)
    await nodes.node_calls.order(node, path)
    _, report = await nodes.node_calls.ask(node, "/record", NodeReport)
    try:
        await take_news(nodes, report, urlsplit(node.url).hostname or "")
    except BadRecord as error:
        raise ServiceError("node_failed", f"node {node.id} sent an impossible record: {error}") from error
    for view in await nodes.cluster.nodes():
        if view.record.id == node.id:
            return json_response(_item(nodes, view))
    raise ServiceError("node_failed", f"node {node.id} does not answer any more")


async def _node(nodes: Nodes, request: Request) -> NodeRecord:
    """Returns the record of the node in the request's path. Raises NotFound. The id from the path is only compared with
    known ids."""
    node_id = request.path_params["id"]
    for view in await nodes.cluster.nodes():
        if view.record.id == node_id:
            return view.record
    raise NotFound(f"there is no node {node_id[:100]!r}")


async def _ref(nodes: Nodes, request: Request) -> AdapterRef:
    ref = await read_message(request, nodes.config, AdapterRef)
    if (ref.function is None) == (ref.digest is None):
        raise invalid("function", "send exactly one of function and digest")
    return ref


async def _adapter_named(nodes: Nodes, request: Request, ref: AdapterRef) -> Adapter:
    """Returns the adapter that a request names. Raises NotFound without such a version, or without its artifact for
    this base."""
    registry, read = nodes.registry, nodes.threads.read
    if ref.digest is not None:
        if not registry.base.has_artifacts:
            raise invalid("digest", "adapters of this base model have no digest here: send `function` instead")
        key = artifact_key(registry.base.fingerprint, ref.digest)  # the message type has checked that it is hexadecimal
        info = await read(registry.store.head, key)
        if info is None:
            raise NotFound(f"there is no adapter {ref.digest}")
        return Adapter(digest=ref.digest, artifact=key, bytes=info.size, ranks=())
    assert ref.function is not None
    name, colon, qualifier = ref.function.partition(":")
    tenant = await nodes.callers.tenant(request)
    resolved = await read(registry.resolve, tenant, name, qualifier if colon else None)
    return adapter_of(resolved)


def _item(nodes: Nodes, node: NodeView) -> NodeItem:
    record = node.record
    strict = msgspec.structs.asdict(record.strict) if record.strict is not None else None
    load = _gpu_load(record.gpu_load) if record.gpu_load is not None else None
    vllm = msgspec.structs.asdict(record.vllm) if record.vllm is not None else None
    residents = [msgspec.structs.asdict(resident) for resident in node.residents.values()]
    reported = msgspec.to_builtins(record)
    fields = {**reported, "strict": strict, "gpu_load": load, "vllm": vllm, "residents": residents}
    fields.pop("received", None)
    return NodeItem(
        record=fields,
        reserved=node.reserved,
        age=round(node.age, 3),
        circuit=nodes.breakers.circuit(record.id, record.epoch),
    )


def _gpu_load(load: GpuLoad) -> dict[str, Any]:
    return {**msgspec.structs.asdict(load), "throttled": throttle_reasons(load.throttled or 0)}


def _adapter(state: AdapterState) -> NodeAdapter:
    fields = {**msgspec.structs.asdict(state), "layers": state.layers or None}
    return msgspec.convert(fields, NodeAdapter)


def _moved(node: NodeRecord, moved: Moved, status: int) -> Response:
    fields = {"node": node.id, "digest": moved.digest, "tier": moved.tier}
    return json_response(msgspec.convert(fields, MovedReply), status)
