"""The routes below /pools as openapi.json lists them."""

from __future__ import annotations

from gateway.api import pool_schema as schema
from gateway.http.operations import ADMIN, Operation

POOL_OPERATIONS = (
    Operation(
        method="get",
        path="/pools",
        id="listPools",
        summary="What calls ask of the node pools now; admin key",
        replies={200: schema.PoolList},
        errors=ADMIN,
    ),
    Operation(
        method="put",
        path="/pools/autoscaler",
        id="leaseAutoscaler",
        summary="Take, prolong or give back the lease by which one autoscaler decides the pools' sizes; admin key",
        body=schema.LeaseRequest,
        replies={200: schema.LeaseReply},
        errors=(400, 413, 415, *ADMIN),
    ),
)
