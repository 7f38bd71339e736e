"""The route /explain/{id} as openapi.json lists it."""

from __future__ import annotations

from gateway.api.explain_schema import ExplainReply
from gateway.http.operations import READ, TENANT, Operation, parameter

EXPLAIN_OPERATIONS = (
    Operation(
        method="get",
        path="/explain/{id}",
        id="explain",
        summary="How a call was placed: candidates, forecasts, choice; its tenant's key, or an admin key",
        parameters=(
            parameter(
                "path",
                "id",
                "The call's id, or the x-request-id of its reply",
                {"type": "string", "maxLength": 200},
            ),
            TENANT,
        ),
        replies={200: ExplainReply},
        errors=READ,
    ),
)
