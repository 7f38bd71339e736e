"""The routes below /nodes/{id} as openapi.json lists them."""

from __future__ import annotations

from gateway.api import node_schema, schema
from gateway.http.operations import TENANT, Operation, parameter

ASK = (401, 403, 404, 422, 429, 500, 502, 503, 504)
ORDER = (400, 401, 403, 404, 409, 413, 415, 422, 429, 500, 502, 503, 504)

_NODE = parameter("path", "id", "The node, as GET /nodes names it")
_TENANT = {**TENANT, "description": "Whose function is meant"}

NODE_OPERATIONS = (
    Operation(
        method="get",
        path="/nodes/{id}/adapters",
        id="listNodeAdapters",
        summary="The adapters on a node: tiers, and layer by layer while they load; admin key",
        parameters=(_NODE,),
        replies={200: node_schema.NodeAdapters},
        errors=ASK,
    ),
    Operation(
        method="post",
        path="/nodes/{id}/prefetch",
        id="prefetch",
        summary="Bring an adapter to a node's device, or to its host memory if the device is in use; admin key",
        parameters=(_NODE, _TENANT),
        body=node_schema.AdapterRef,
        replies={200: node_schema.MovedReply, 202: node_schema.MovedReply},
        errors=ORDER,
    ),
    Operation(
        method="post",
        path="/nodes/{id}/evict",
        id="evict",
        summary="Take an adapter off a node's device, host memory and disk; 409 while it is in use; admin key",
        parameters=(_NODE, _TENANT),
        body=node_schema.AdapterRef,
        replies={200: node_schema.MovedReply},
        errors=ORDER,
    ),
    Operation(
        method="post",
        path="/nodes/{id}/drain",
        id="drainNode",
        summary="Give a node no new requests; running ones end; admin key",
        parameters=(_NODE,),
        replies={200: schema.NodeItem},
        errors=ASK,
    ),
    Operation(
        method="post",
        path="/nodes/{id}/undrain",
        id="undrainNode",
        summary="Give it requests again; admin key",
        parameters=(_NODE,),
        replies={200: schema.NodeItem},
        errors=ASK,
    ),
)
