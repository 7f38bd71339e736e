"""Routes for adapters, passed on to the engine: GET /adapters, POST /adapters/prefetch and /adapters/evict for
operators; POST /adapters/wanted for the gateway's prefetch hints."""

from __future__ import annotations

import math
import secrets
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.names import DIGEST
from cluster.errors import ServiceError
from cluster.messages import VersionMismatch, check_version
from cluster.residency import MAX_IDLE_TTLS, MAX_WANTED, EvictOrder, Moved, PrefetchOrder, WantedResidency
from node_agent.api.request import read_body
from node_agent.api.requests import RequestRegistry
from node_agent.ipc import Answer, Evict, ListAdapters, Prefetch, Question

ANSWER_SECONDS = 10.0
"""Maximum seconds to wait for the engine's answer. A prefetch that takes longer continues, and its caller gets status
202."""
ORDER_BYTES = 1 << 16
WANTED_BYTES = 1 << 18
"""Maximum bytes of the gateway's message with prefetch hints: MAX_WANTED adapters with ranks and long artifact keys,
and MAX_IDLE_TTLS digests."""

Order = TypeVar("Order", PrefetchOrder, EvictOrder, WantedResidency)


def adapter_routes(registry: RequestRegistry) -> list[Route]:
    async def adapters(_request: Request) -> Response:
        return _packed((await ask(registry, ListAdapters(new_id()))).found)

    async def prefetch(request: Request) -> Response:
        order = await _order(request, PrefetchOrder)
        digest = _checked(order.adapter.digest)
        answer = await registry.ask(Prefetch(new_id(), order.adapter, order.tenant), ANSWER_SECONDS)
        if answer is None:
            return _packed(Moved(digest, None), status=202)
        return _packed(Moved(digest, answer.tier))

    async def evict(request: Request) -> Response:
        digest = _checked((await _order(request, EvictOrder)).digest)
        return _packed(Moved(digest, (await ask(registry, Evict(new_id(), digest))).tier))

    async def set_wanted(request: Request) -> Response:
        registry.want(_check_wanted(await _order(request, WantedResidency, WANTED_BYTES)))
        return Response(status_code=204)

    return [
        Route("/adapters", adapters, methods=["GET"]),
        Route("/adapters/prefetch", prefetch, methods=["POST"]),
        Route("/adapters/evict", evict, methods=["POST"]),
        Route("/adapters/wanted", set_wanted, methods=["POST"]),
    ]


async def ask(registry: RequestRegistry, question: Question) -> Answer:
    """Returns the engine's answer. Raises ServiceError, also when it takes longer than ANSWER_SECONDS."""
    answer = await registry.ask(question, ANSWER_SECONDS)
    if answer is None:
        raise ServiceError("timeout", f"the engine did not answer within {ANSWER_SECONDS:g} s")
    return answer


async def _order(request: Request, kind: type[Order], limit: int = ORDER_BYTES) -> Order:
    body = await read_body(request, limit)
    try:
        order = msgspec.msgpack.decode(body, type=kind)
        check_version(order.v)
    except (msgspec.DecodeError, VersionMismatch) as error:
        raise ServiceError("invalid_request", f"not a {kind.__name__}: {error}") from error
    return order


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise ServiceError("validation_failed", "digest must be 64 lower-case hexadecimal digits")
    return digest


def _check_wanted(residency: WantedResidency) -> WantedResidency:
    """Returns the gateway's hints after checking them. Raises ServiceError (`validation_failed`)."""
    if len(residency.adapters) > MAX_WANTED:
        raise ServiceError("validation_failed", f"adapters has more than {MAX_WANTED}", param="adapters")
    if not 0 <= residency.seconds < math.inf:
        raise ServiceError("validation_failed", "seconds must be a finite number, 0 or more", param="seconds")
    for want in residency.adapters:
        _checked(want.adapter.digest)
        if not 0 <= want.chance <= 1 or want.adapter.bytes < 0:
            raise ServiceError("validation_failed", "chance must be in [0, 1], and bytes at least 0", param="chance")
    if len(residency.idle_ttls) > MAX_IDLE_TTLS:
        raise ServiceError("validation_failed", f"idle_ttls has more than {MAX_IDLE_TTLS}", param="idle_ttls")
    for digest, seconds in residency.idle_ttls.items():
        _checked(digest)
        if not 0 < seconds < math.inf:
            raise ServiceError("validation_failed", "an idle_ttl must be finite and above 0", param="idle_ttls")
    return residency


def new_id() -> str:
    """Returns a random question id, so that answers to an earlier API process's questions do not match."""
    return secrets.token_hex(8)


def _packed(message: msgspec.Struct | None, status: int = 200) -> Response:
    return Response(msgspec.msgpack.encode(message), status, media_type="application/msgpack")
