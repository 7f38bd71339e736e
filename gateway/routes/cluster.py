"""What nodes tell the gateway (cluster secret)."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.messages import NodeRecord, VersionMismatch
from cluster.record_check import BadRecord, check_record
from cluster.secret import is_authorized
from cluster.state import TooManyNodes
from gateway.bodies import read_body
from gateway.params import known_only
from gateway.routing import ExactRoute
from gateway.services import services_of

RECORD_LIMIT = 4 << 20
"""Bytes of a record: some 20,000 resident adapters."""
RECORD_SECONDS = 5.0

_decoder = msgspec.msgpack.Decoder(NodeRecord)


async def record(request: Request) -> Response:
    services = services_of(request)
    if not is_authorized(request.headers.get("authorization"), services.secret):
        raise ServiceError("unauthenticated", "the cluster secret is missing or wrong")
    known_only(request)
    body = await read_body(request, RECORD_LIMIT, RECORD_SECONDS, RECORD_SECONDS)
    try:
        told = _decoder.decode(body)
        if not services.record_rates.allows(told.id):
            raise ServiceError("rate_limited", f"node {told.id[:60]} sends too many records", retry_after=1.0)
        check_record(told, request.client.host if request.client else "", services.config.node_hosts)
        await services.cluster.publish(told)
    except msgspec.DecodeError as error:
        raise ServiceError("invalid_request", f"not a node record: {error}") from error
    except (VersionMismatch, BadRecord) as error:
        raise ServiceError("invalid_request", str(error)) from error
    except TooManyNodes as error:
        raise ServiceError("overloaded", str(error)) from error
    return Response(status_code=204)


routes = [ExactRoute("/cluster/record", record, methods=["POST"])]
