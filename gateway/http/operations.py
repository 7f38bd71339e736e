"""The public routes as openapi.json lists them: parameters, bodies, replies and errors of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.api import openai_schema as openai
from gateway.api import schema

NAME_PATTERN = "^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
TEXT = {"type": "string"}
NAME_TEXT = {"type": "string", "pattern": NAME_PATTERN}
ADMIN = (401, 403, 422, 429, 500, 503)
READ = (400, 401, 403, 404, 422, 429, 500, 503)
CALL = (400, 401, 403, 404, 413, 415, 422, 429, 499, 500, 502, 503, 504)
OPENAI_CALL = tuple(status for status in CALL if status != 422)
OPENAI_READ = tuple(status for status in READ if status != 422)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path, as the document has it."""

    method: str
    path: str
    id: str
    summary: str
    replies: Mapping[int, type[Any] | None]
    body: type[Any] | None = None
    stream: str = ""
    """What the reply is as text/event-stream, if it can be."""
    parameters: Sequence[Mapping[str, Any]] = ()
    errors: Sequence[int] = READ
    key: bool = True
    multipart: bool = False
    """Whether the adapter's files are taken as the body, too."""
    etag: bool = False
    """Whether a successful reply has one."""


def parameter(place: str, name: str, about: str, kind: Mapping[str, Any] = TEXT) -> dict[str, Any]:
    """`place`: path, query or header; `kind`: its JSON schema."""
    return {"name": name, "in": place, "required": place == "path", "description": about, "schema": dict(kind)}


NAME = parameter("path", "name", "The function", NAME_TEXT)
TENANT = parameter("header", "x-garnish-tenant", "With an admin key: whose functions are meant", NAME_TEXT)
IF_MATCH = parameter("header", "if-match", "An ETag of the function: answered 412 when it has changed since")
_SESSION = parameter(
    "header",
    "x-garnish-session",
    "Calls with equal ones are on the same side of an alias that splits its calls",
    {"type": "string", "maxLength": 256},
)
_BOOLEAN = {"type": "boolean", "default": False}

OPERATIONS = (
    Operation(
        method="post",
        path="/deploy/{name}",
        id="deploy",
        summary="Make an adapter's files, sent or in an allowed place, a version of a function; point an alias to it",
        parameters=(NAME, parameter("query", "dry_run", "Only validate; nothing is stored", _BOOLEAN), TENANT),
        body=schema.DeploySource,
        multipart=True,
        replies={201: schema.DeployReply, 200: schema.DeployReply},
        errors=(400, 401, 403, 404, 409, 413, 415, 422, 429, 500, 503),
    ),
    Operation(
        method="get",
        path="/functions",
        id="listFunctions",
        summary="The tenant's functions, a page at a time",
        parameters=(
            parameter(
                "query",
                "limit",
                "Functions per page",
                {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
            ),
            parameter("query", "after", "`next` of the page before", NAME_TEXT),
            TENANT,
        ),
        replies={200: schema.FunctionList},
    ),
    Operation(
        method="get",
        path="/functions/{name}",
        id="getFunction",
        summary="One function: policy, aliases, versions, where they are resident, its last hour",
        parameters=(NAME, TENANT),
        replies={200: schema.FunctionReply},
        etag=True,
    ),
    Operation(
        method="delete",
        path="/functions/{name}",
        id="deleteFunction",
        summary="Delete a function: new calls answer 404 at once, running ones finish",
        parameters=(NAME, parameter("query", "force", "Cancel the running ones, too", _BOOLEAN), TENANT, IF_MATCH),
        replies={204: None},
        errors=(*READ, 412),
    ),
    Operation(
        method="get",
        path="/functions/{name}/versions",
        id="listVersions",
        summary="The manifests of all versions",
        parameters=(NAME, TENANT),
        replies={200: schema.VersionList},
    ),
    Operation(
        method="get",
        path="/functions/{name}/versions/{version}",
        id="getVersion",
        summary="The manifest of one version",
        parameters=(NAME, parameter("path", "version", "Its number", {"type": "integer", "minimum": 1}), TENANT),
        replies={200: schema.VersionReply},
    ),
    Operation(
        method="post",
        path="/invoke/{target}",
        id="invoke",
        summary="Generate text with a function",
        parameters=(
            parameter("path", "target", "`name`, `name:alias`, `name:version`, or the base model's id"),
            parameter("query", "qualifier", "Alias or version, if the path names none"),
            TENANT,
            _SESSION,
        ),
        body=schema.InvokeRequest,
        replies={200: schema.InvokeReply},
        stream="Events `token` (TokenEvent), then one `done` (DoneEvent), or `error` (ErrorReply)",
        errors=CALL,
    ),
    Operation(
        method="get",
        path="/v1/models",
        id="listModels",
        summary="The base model and the tenant's functions",
        parameters=(TENANT,),
        replies={200: openai.ModelList},
        errors=OPENAI_READ,
    ),
    Operation(
        method="get",
        path="/v1/models/{id}",
        id="getModel",
        summary="One of them",
        parameters=(parameter("path", "id", "As `model` in a completion"), TENANT),
        replies={200: openai.Model},
        errors=OPENAI_READ,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        id="createCompletion",
        summary="Complete a prompt",
        parameters=(TENANT, _SESSION),
        body=openai.CompletionRequest,
        replies={200: openai.Completion},
        stream="Completion chunks, then `data: [DONE]`",
        errors=OPENAI_CALL,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        id="createChatCompletion",
        summary="Answer a conversation",
        parameters=(TENANT, _SESSION),
        body=openai.ChatRequest,
        replies={200: openai.Chat},
        stream="ChatChunk chunks, then `data: [DONE]`",
        errors=OPENAI_CALL,
    ),
    Operation(
        method="get",
        path="/healthz",
        id="healthz",
        summary="Whether the process lives",
        replies={200: schema.HealthReply},
        errors=(422,),
        key=False,
    ),
    Operation(
        method="get",
        path="/health",
        id="health",
        summary="The same, where vLLM's clients ask",
        replies={200: schema.HealthReply},
        errors=(422,),
        key=False,
    ),
    Operation(
        method="get",
        path="/readyz",
        id="readyz",
        summary="Whether registry, cluster state and at least one node can serve now",
        replies={200: schema.ReadyReply},
        errors=(422, 503),
        key=False,
    ),
    Operation(
        method="get",
        path="/metrics",
        id="metrics",
        summary="Prometheus text; admin key",
        replies={200: str},
        errors=ADMIN,
    ),
    Operation(
        method="get",
        path="/nodes",
        id="listNodes",
        summary="The nodes as the scheduler sees them; admin key",
        replies={200: schema.NodeList},
        errors=ADMIN,
    ),
)
