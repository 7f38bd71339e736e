"""Generates gateway/openapi.json from all routes and the message types that validate their requests.

Run `python -m gateway.routes.openapi` after changing a message or a route; a test compares the committed file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.api import openai_schema as openai
from gateway.api import schema
from gateway.http.routing import Operation
from gateway.routes.all_routes import ALL

DOCUMENTED = [operation for operation in ALL if operation.summary]
FILE = Path(__file__).parents[1] / "openapi.json"

TAGS = {
    "Calls": ("invoke", "explain"),
    "Functions": ("deploy", "functions"),
    "OpenAI-compatible": ("v1", "tokenize", "detokenize"),
    "Operations": (),
}
"""Groups of routes by the first parts of their paths, in the order in which viewers list them."""

STATUS_TEXT = {
    400: "Broken JSON, a broken or slow body, an admin key without tenant; on /v1 also wrong fields",
    401: "No key, or not a valid one",
    403: "The key may not do this",
    404: "No such function, version, alias, node, call, file or batch, or it belongs to another tenant",
    409: "Not while things are as they are: something is in use, there already or declared, a limit is reached",
    412: "The function has changed since it had the ETag in If-Match",
    413: "The body is over its limit",
    415: "Another content type is expected",
    422: "Wrong types, values or unknown fields; `param` names the field, `details` lists several problems",
    429: "Full; try again after Retry-After seconds",
    499: "Cancelled, because the function was deleted by force",
    500: "Unexpected; the log has it under the request id",
    502: "The node died and no other one could take over; try again after Retry-After seconds",
    503: "No node, or no registry; try again after Retry-After seconds",
    504: "The timeout passed before the first token",
    507: "It can't be stored, because a disk is full or read-only; calls that store nothing go on",
}


def document() -> dict[str, Any]:
    """Returns the complete OpenAPI 3.1 document."""
    schemas, components = _components()
    paths: dict[str, dict[str, Any]] = {}
    for operation in DOCUMENTED:
        path = re.sub(r":\w+}", "}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Garnish",
            "version": "1",
            "description": "LoRA adapters of one base model as serverless functions.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"apiKey": []}],
        "tags": [{"name": tag} for tag in TAGS],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": components,
        },
    }


def _components() -> tuple[dict[type[Any], Any], dict[str, Any]]:
    """Returns a reference per message type, and the schemas to which the references point."""
    types: set[type[Any]] = {schema.ErrorReply, openai.OpenAIError, schema.TokenEvent, schema.DoneEvent}
    types.add(openai.ChatChunk)
    for operation in DOCUMENTED:
        kinds = (*operation.replies.values(), operation.details.get("body"))
        types |= {kind for kind in kinds if kind not in (None, str, bytes)}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    return dict(zip(ordered, references, strict=True)), components


def _operation(operation: Operation, schemas: Mapping[type[Any], Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _id(operation.endpoint.__name__),
        "tags": [_tag(operation.path)],
        "summary": operation.summary,
        "parameters": list(operation.parameters),
        "responses": _responses(operation, schemas),
    }
    if operation.limits:
        described["x-garnish-limits"] = list(operation.limits)
    if not operation.key:
        described["security"] = []
    content: dict[str, Any] = {}
    if "multipart" in operation.details:
        content["multipart/form-data"] = {"schema": operation.details["multipart"]}
    if "body" in operation.details:
        content["application/json"] = {"schema": schemas[operation.details["body"]]}
    if content:
        described["requestBody"] = {"required": True, "content": content}
    return described


def _id(name: str) -> str:
    """Returns the operation id for a handler's name, in the style of generated clients: `get_alias` is `getAlias`."""
    return re.sub(r"_(\w)", lambda letter: letter[1].upper(), name)


def _tag(path: str) -> str:
    """Returns the tag under which viewers list this path."""
    first = path.split("/")[1]
    return next((tag for tag, firsts in TAGS.items() if first in firsts), "Operations")


def _responses(operation: Operation, schemas: Mapping[type[Any], Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in operation.replies.items():
        headers = {**_REQUEST_ID, **_ETAG} if operation.details.get("etag") else _REQUEST_ID
        responses[str(status)] = {"description": "Done", "headers": headers}
        if kind is str:
            media = operation.details.get("media", "text/plain")
            responses[str(status)]["content"] = {media: {"schema": {"type": "string"}}}
        elif kind is bytes:
            described = {"type": "string", "contentMediaType": "application/octet-stream"}
            responses[str(status)]["content"] = {"application/octet-stream": {"schema": described}}
        elif kind is not None:
            responses[str(status)]["content"] = {"application/json": {"schema": schemas[kind]}}
        if "stream" in operation.details:
            described = {"type": "string", "description": operation.details["stream"]}
            responses[str(status)]["content"]["text/event-stream"] = {"schema": described}
    error = schemas[openai.OpenAIError if operation.path.startswith("/v1/") else schema.ErrorReply]
    for status in sorted(operation.errors):
        content = {"application/json": {"schema": error}}
        responses[str(status)] = {"description": STATUS_TEXT[status], "headers": _REQUEST_ID, "content": content}
    return responses


_REQUEST_ID = {
    "x-request-id": {"description": "The caller's own, when it sent a sane one", "schema": {"type": "string"}}
}
_ETAG = {"etag": {"description": "The function's generation, for If-Match", "schema": {"type": "string"}}}


def render() -> bytes:
    """Returns the document as it is committed and served."""
    return json.dumps(document(), indent=1).encode() + b"\n"


if __name__ == "__main__":
    FILE.write_bytes(render())
