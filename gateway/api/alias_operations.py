"""The routes that change a function in place, as openapi.json lists them."""

from __future__ import annotations

from adapters.functions import Policy
from gateway.api import alias_schema, schema
from gateway.http.operations import IF_MATCH, NAME, NAME_TEXT, READ, TENANT, Operation, parameter

CHANGE = (*READ, 409, 412)
_SENT = (*CHANGE, 413, 415)
_ALIAS = parameter("path", "alias", "Not all digits", NAME_TEXT)

ALIAS_OPERATIONS = (
    Operation(
        method="patch",
        path="/functions/{name}",
        id="changePolicy",
        summary="Change the stated fields of a function's policy; null takes one back",
        parameters=(NAME, TENANT, IF_MATCH),
        body=Policy,
        replies={200: schema.FunctionReply},
        errors=_SENT,
        etag=True,
    ),
    Operation(
        method="delete",
        path="/functions/{name}/versions/{version}",
        id="deleteVersion",
        summary="Delete a version that no alias points to",
        parameters=(
            NAME,
            parameter("path", "version", "Its number", {"type": "integer", "minimum": 1}),
            TENANT,
            IF_MATCH,
        ),
        replies={204: None},
        errors=CHANGE,
    ),
    Operation(
        method="get",
        path="/functions/{name}/aliases/{alias}",
        id="getAlias",
        summary="Where an alias points, and where it pointed before",
        parameters=(NAME, _ALIAS, TENANT),
        replies={200: alias_schema.AliasReply},
        etag=True,
    ),
    Operation(
        method="put",
        path="/functions/{name}/aliases/{alias}",
        id="putAlias",
        summary="Point an alias, new or known, to a version, or split its calls between some",
        parameters=(NAME, _ALIAS, TENANT, IF_MATCH),
        body=alias_schema.AliasTarget,
        replies={200: alias_schema.AliasReply},
        errors=_SENT,
        etag=True,
    ),
    Operation(
        method="post",
        path="/functions/{name}/rollback",
        id="rollBack",
        summary="Point an alias to what it pointed to before",
        parameters=(NAME, TENANT, IF_MATCH),
        body=alias_schema.Rollback,
        replies={200: alias_schema.AliasReply},
        errors=_SENT,
        etag=True,
    ),
)
