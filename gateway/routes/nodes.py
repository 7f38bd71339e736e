"""GET /nodes and what lies below it: nodes as the scheduler sees them, their adapters, draining. Admin keys only."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.artifact import artifact_key
from adapters.errors import NotFound
from cluster.errors import ServiceError
from cluster.messages import Adapter
from cluster.news import NodeRecord
from cluster.record_check import BadRecord
from cluster.residency import AdapterState, AdapterStates, EvictOrder, Moved, PrefetchOrder
from cluster.state import NodeView
from gateway.api import node_schema, schema
from gateway.http.bodies import decode_json, read_body, require_json
from gateway.http.params import known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.routes.cluster import take_news
from gateway.services import Services, services_of


async def nodes(request: Request) -> Response:
    services = await _admin(request)
    return json_response(schema.NodeList(nodes=[_item(services, node) for node in await services.cluster.nodes()]))


async def adapters(request: Request) -> Response:
    services = await _admin(request)
    node = await _node(services, request)
    _, found = await services.node_calls.ask(node, "/adapters", AdapterStates)
    listed = [_adapter(state) for state in found.adapters]
    return json_response(node_schema.NodeAdapters(node=node.id, adapters=listed, unnamed=found.unnamed))


async def prefetch(request: Request) -> Response:
    services = await _admin(request)
    adapter = await _named(services, request, await _ref(services, request))
    node = await _node(services, request)
    status, moved = await services.node_calls.ask(node, "/adapters/prefetch", Moved, PrefetchOrder(adapter))
    return _moved(node, moved, status)


async def evict(request: Request) -> Response:
    services = await _admin(request)
    ref = await _ref(services, request)
    digest = ref.digest or (await _named(services, request, ref)).digest
    node = await _node(services, request)
    status, moved = await services.node_calls.ask(node, "/adapters/evict", Moved, EvictOrder(digest))
    return _moved(node, moved, status)


async def drain(request: Request) -> Response:
    return await _set_draining(request, "/drain")


async def undrain(request: Request) -> Response:
    return await _set_draining(request, "/undrain")


async def _set_draining(request: Request, path: str) -> Response:
    """The node refuses by itself from now on; its new record is taken in here, so that none is sent there in vain."""
    services = await _admin(request)
    node = await _node(services, request)
    await services.node_calls.order(node, path)
    told = await services.node_calls.ask_news(node)
    try:
        await take_news(services, told, urlsplit(node.url).hostname or "")
    except BadRecord as error:
        raise ServiceError("node_failed", f"node {node.id} says something that can't be: {error}") from error
    for view in await services.cluster.nodes():
        if view.record.id == node.id:
            return json_response(_item(services, view))
    raise ServiceError("node_failed", f"node {node.id} has fallen silent")


async def _admin(request: Request) -> Services:
    services = services_of(request)
    await services.callers.admin(request)
    known_only(request)
    return services


async def _node(services: Services, request: Request) -> NodeRecord:
    """Raises NotFound. The id is compared, and used for nothing else."""
    wanted = request.path_params["id"]
    for view in await services.cluster.nodes():
        if view.record.id == wanted:
            return view.record
    raise NotFound(f"there is no node {wanted[:100]!r}")


async def _ref(services: Services, request: Request) -> node_schema.AdapterRef:
    require_json(request)
    config = services.config
    body = await read_body(request, config.call_body, config.body_seconds, config.body_idle_seconds)
    ref = decode_json(body, node_schema.AdapterRef)
    if (ref.function is None) == (ref.digest is None):
        raise ServiceError("validation_failed", "send exactly one of function and digest", param="function")
    return ref


async def _named(services: Services, request: Request, ref: node_schema.AdapterRef) -> Adapter:
    """Raises NotFound when the registry has no such version, or no artifact of it for this base."""
    registry, read = services.registry, services.threads.read
    if ref.digest is not None:
        key = artifact_key(registry.base.fingerprint, ref.digest)  # the message type has checked that it is hexadecimal
        info = await read(registry.store.head, key)
        if info is None:
            raise NotFound(f"there is no adapter {ref.digest}")
        return Adapter(digest=ref.digest, artifact=key, bytes=info.size, ranks=())
    assert ref.function is not None
    name, colon, qualifier = ref.function.partition(":")
    tenant = await services.callers.tenant(request)
    found = await read(registry.resolve, tenant, name, qualifier if colon else None)
    return Adapter(digest=found.digest, artifact=found.artifact_key, bytes=found.bytes, ranks=found.ranks)


def _item(services: Services, node: NodeView) -> schema.NodeItem:
    record = node.record
    strict = msgspec.structs.asdict(record.strict) if record.strict is not None else None
    residents = [msgspec.structs.asdict(resident) for resident in node.residents.values()]
    told = {**msgspec.to_builtins(record), "strict": strict, "residents": residents}
    told.pop("received", None)
    return schema.NodeItem(
        record=told,
        reserved=node.reserved,
        age=round(node.age, 3),
        circuit=services.breakers.circuit(record.id, record.epoch),
    )


def _adapter(state: AdapterState) -> node_schema.NodeAdapter:
    fields = {**msgspec.structs.asdict(state), "layers": state.layers or None}
    return msgspec.convert(fields, node_schema.NodeAdapter)


def _moved(node: NodeRecord, moved: Moved, status: int) -> Response:
    fields = {"node": node.id, "digest": moved.digest, "tier": moved.tier}
    return json_response(msgspec.convert(fields, node_schema.MovedReply), status)


routes = [
    ExactRoute("/nodes", nodes, methods=["GET"]),
    ExactRoute("/nodes/{id}/adapters", adapters, methods=["GET"]),
    ExactRoute("/nodes/{id}/prefetch", prefetch, methods=["POST"]),
    ExactRoute("/nodes/{id}/evict", evict, methods=["POST"]),
    ExactRoute("/nodes/{id}/drain", drain, methods=["POST"]),
    ExactRoute("/nodes/{id}/undrain", undrain, methods=["POST"]),
]
