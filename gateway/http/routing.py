"""The table of routes. Each route is declared once, at its handler; Starlette's routes and openapi.json are derived
from it.

    routes = Routes(Catalog)

    @routes.tenant("GET /functions/{name}", "One function", {200: FunctionReply})
    async def get_function(request: Request, catalog: Catalog, tenant: str) -> Response: ...

A module's handlers get one group of the gateway's parts (gateway.groups), whose type is the argument of Routes. The
decorator determines who may call the route, which of the tenant's rates limits it, and the handler's further arguments.
Undeclared query parameters are refused before the handler runs. The handler's name is the operation's id in the
document, and the route in metrics.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Generic, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from cluster.http_protocol import mark_keyed
from gateway.http.params import SESSION_HEADER, TENANT_HEADER, known_only
from gateway.http.rates import CALL, READ, WRITE, RouteRate, TakeRate
from gateway.http.stopwatch import Stopwatch
from gateway.places.places import SERVICE, owner_now
from gateway.places.pools import hold_place

G = TypeVar("G")
H = TypeVar("H")
Declare = Callable[[H], H]
"""Decorator of handlers, which returns them unchanged."""
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Parameter = Mapping[str, Any]
"""Parameter in the form of the OpenAPI document."""
Replies = Mapping[int, type[Any] | None]
"""Message types of replies, by status. `str` means plain text, `bytes` any media type, and None no body."""

NAME_PATTERN = "^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
TEXT = {"type": "string"}
NAME_TEXT = {"type": "string", "pattern": NAME_PATTERN}
BOOLEAN = {"type": "boolean", "default": False}

KEY_ERRORS = (401, 403, 429, 500, 503)
TENANT_ERRORS = (400, 404, *KEY_ERRORS)
CALL_ERRORS = (499, 502, 504, *TENANT_ERRORS)
BODY_ERRORS = (400, 413, 415)


def parameter(place: str, name: str, about: str, kind: Mapping[str, Any] = TEXT) -> Parameter:
    """Returns a parameter of the OpenAPI document. `place`: path, query or header. `kind`: its JSON schema."""
    return {"name": name, "in": place, "required": place == "path", "description": about, "schema": dict(kind)}


PATH_PARAMETERS = {
    "name": parameter("path", "name", "The function", NAME_TEXT),
    "version": parameter("path", "version", "Its number", {"type": "integer", "minimum": 1}),
    "alias": parameter("path", "alias", "Not all digits", NAME_TEXT),
    "tenant": parameter("path", "tenant", "The tenant", NAME_TEXT),
    "key_id": parameter("path", "key_id", "Its id"),
    "secret_id": parameter("path", "secret_id", "Its id"),
    "id": parameter("path", "id", "The invocation's id"),
}
TENANT = parameter("header", TENANT_HEADER, "With an admin key: whose functions are meant", NAME_TEXT)
IF_MATCH = parameter("header", "if-match", "An ETag of the function: answered 412 when it has changed since")
SESSION = parameter(
    "header",
    SESSION_HEADER,
    "Calls with equal ones are on the same side of an alias that splits its calls",
    {"type": "string", "maxLength": 256},
)


class Caller(msgspec.Struct, frozen=True):
    """Caller of a request. `tenant`: owner of the key; None for an admin key. `key_id`: None if no keys are
    required."""

    tenant: str | None
    admin: bool
    key_id: str | None = None


class Authenticator(Protocol):
    """Authenticates requests by their key. Methods raise ServiceError."""

    async def caller(self, request: Request) -> Caller: ...

    async def tenant(self, request: Request) -> str:
        """Returns the tenant for which the request is made."""

    async def admin(self, request: Request) -> None:
        """Checks that the request has an admin key. Raises ServiceError, `forbidden` for a tenant's key."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Operation of the API: one HTTP method of one path."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    """Summary in the OpenAPI document. An operation with an empty summary is not in the document."""
    replies: Replies
    parameters: Sequence[Parameter]
    errors: frozenset[int]
    key: bool
    rate: RouteRate | None
    """Rate of the tenant that limits requests; None for routes without a key, and those for admin keys only."""
    details: Details

    @property
    def limits(self) -> tuple[str, ...]:
        """Returns the names of the tenant's limits that bound this operation."""
        return (() if self.rate is None else (self.rate.rate,)) + tuple(self.details.get("limits", ()))


class Details(TypedDict, total=False):
    """Optional details of a route."""

    body: type[Any]
    parameters: Sequence[Parameter]
    """Parameters of the query and headers, and those of the path that differ from PATH_PARAMETERS."""
    errors: Sequence[int]
    """Error statuses in addition to those that follow from the caller, the path and the body."""
    media: str
    """Media type of a text reply; default: text/plain."""
    stream: str
    """Description of the events, if the reply can be text/event-stream."""
    multipart: Mapping[str, Any]
    """JSON schema of the form that is accepted as an alternative body."""
    etag: bool
    if_match: bool
    rate: RouteRate
    """Rate that limits the route, if it is not the default: `rps` for calls, else reads for GET and writes for other
    methods."""
    limits: Sequence[str]
    """Names of the tenant's limits that bound the route in addition to its rate."""


class Routes(list[Operation], Generic[G]):
    """Routes of one module. `group`: type of the group of parts that handlers get; None if they get no group."""

    def __init__(self, group: type[G] | None = None) -> None:
        super().__init__()
        self._group = group

    def group(self, request: Request) -> G:
        """Returns the group of parts for this module's handlers. Only handlers of public routes need to call it."""
        return cast(G, request.state.groups[self._group])

    def public(
        self, target: str, summary: str = "", replies: Replies | None = None, **details: Unpack[Details]
    ) -> Declare[Endpoint]:
        """Declares a route without a key. Without a summary it is not in the OpenAPI document."""

        async def enter(_: Request) -> tuple[()]:
            return ()

        return self._declare(enter, target, summary, replies or {}, details, (), None, key=False)

    def tenant(
        self, target: str, summary: str, replies: Replies, **details: Unpack[Details]
    ) -> Declare[TenantHandler[G]]:
        """Declares a route for a tenant's key, or for an admin key that names a tenant."""

        rate = _rate(target, details)

        async def enter(request: Request) -> tuple[G, str]:
            tenant = await _authenticator(request).tenant(request)
            await _begin(request, tenant, rate)
            return self.group(request), tenant

        return self._declare(enter, target, summary, replies, details, TENANT_ERRORS, rate, (TENANT,))

    def call(self, target: str, summary: str, replies: Replies, **details: Unpack[Details]) -> Declare[CallHandler[G]]:
        """Declares a route for calls of functions, like `tenant`. The handler also gets a Stopwatch."""

        async def enter(request: Request) -> tuple[G, str, Stopwatch]:
            watch = Stopwatch()
            tenant = await _authenticator(request).tenant(request)
            await _begin(request, tenant, CALL)
            watch.lap("auth")
            return self.group(request), tenant, watch

        return self._declare(enter, target, summary, replies, details, CALL_ERRORS, CALL, (TENANT, SESSION))

    def admin(
        self, target: str, summary: str, replies: Replies, **details: Unpack[Details]
    ) -> Declare[AdminHandler[G]]:
        """Declares a route for admin keys only."""

        async def enter(request: Request) -> tuple[G]:
            await _authenticator(request).admin(request)
            return (self.group(request),)

        return self._declare(enter, target, f"{summary}; admin key", replies, details, KEY_ERRORS, None)

    def caller(
        self, target: str, summary: str, replies: Replies, **details: Unpack[Details]
    ) -> Declare[CallerHandler[G]]:
        """Declares a route for any key. The handler gets the caller, so it can show more to admin keys."""
        rate = _rate(target, details)

        async def enter(request: Request) -> tuple[G, Caller]:
            caller = await _authenticator(request).caller(request)
            if caller.tenant is not None and not caller.admin:
                await _begin(request, caller.tenant, rate)
            owner_now.set(caller.tenant or SERVICE)
            return self.group(request), caller

        return self._declare(enter, target, summary, replies, details, KEY_ERRORS, rate)

    def _declare(
        self,
        enter: Callable[[Request], Awaitable[tuple[Any, ...]]],
        target: str,
        summary: str,
        replies: Replies,
        details: Details,
        errors: Sequence[int],
        rate: RouteRate | None,
        headers: Sequence[Parameter] = (),
        *,
        key: bool = True,
    ) -> Callable[[Any], Any]:
        """Declares a route. `enter` checks the caller and returns the handler's arguments after the request."""
        method, path = target.split(" ")
        parameters = _parameters(path, details, headers)
        queries = [each["name"] for each in parameters if each["in"] == "query"]

        def declared(handler: Callable[..., Awaitable[ASGIApp]]) -> Callable[..., Awaitable[ASGIApp]]:
            @wraps(handler)
            async def endpoint(request: Request) -> ASGIApp:
                arguments = await enter(request)
                if key:
                    mark_keyed(request.scope)
                known_only(request, *queries)
                return await handler(request, *arguments)

            self.append(
                Operation(
                    method=method,
                    path=path,
                    endpoint=endpoint,
                    summary=summary,
                    replies=replies,
                    parameters=parameters,
                    errors=_errors(method, path, details, errors),
                    key=key,
                    rate=rate,
                    details=details,
                )
            )
            return handler

        return declared


TenantHandler = Callable[[Request, G, str], Awaitable[ASGIApp]]
CallHandler = Callable[[Request, G, str, Stopwatch], Awaitable[ASGIApp]]
AdminHandler = Callable[[Request, G], Awaitable[ASGIApp]]
CallerHandler = Callable[[Request, G, Caller], Awaitable[ASGIApp]]


async def take_rate(request: Request, tenant: str, rate: RouteRate) -> None:
    """Takes a request's amount from a rate of its tenant. Raises ServiceError `rate_limited`."""
    await cast(TakeRate, request.state.take_rate)(request, tenant, rate)


async def _begin(request: Request, tenant: str, rate: RouteRate) -> None:
    """Begins a tenant's request: takes one of the worker's places for open requests, which is given back at the end
    of the reply, and the request's amount from the rate. Raises ServiceError `overloaded` and `rate_limited`."""
    hold_place(request, "requests", tenant)
    await take_rate(request, tenant, rate)
    owner_now.set(tenant)


def _rate(target: str, details: Details) -> RouteRate:
    return details.get("rate", READ if target.startswith("GET ") else WRITE)


def _authenticator(request: Request) -> Authenticator:
    return cast(Authenticator, request.state.callers)


def _parameters(path: str, details: Details, headers: Sequence[Parameter]) -> list[Parameter]:
    """Returns all parameters of a route: path, query and headers."""
    stated = details.get("parameters", ())
    in_path = PATH_PARAMETERS | {each["name"]: each for each in stated if each["in"] == "path"}
    return [
        *(in_path[name] for name in re.findall(r"{(\w+)", path)),
        *(each for each in stated if each["in"] == "query"),
        *headers,
        *(each for each in stated if each["in"] == "header"),
        *([IF_MATCH] if details.get("if_match") else []),
    ]


def _errors(method: str, path: str, details: Details, errors: Sequence[int]) -> frozenset[int]:
    """Returns the error statuses of a route. OpenAI's clients don't know 422, so /v1 uses 400 instead."""
    statuses = {*errors, *details.get("errors", ())}
    if method != "GET":
        statuses.add(507)
    if "{" in path:
        statuses.add(404)
    if "body" in details or "multipart" in details:
        statuses.update(BODY_ERRORS)
    if details.get("if_match"):
        statuses.add(412)
    return frozenset(statuses if path.startswith("/v1/") else {*statuses, 422})


class ExactRoute(Route):
    """Route that matches paths exactly.

    Starlette's own allows a newline at the end of the path and drops it from parameters of type `path`, so a malformed
    name would match.
    """

    def __init__(self, path: str, endpoint: Endpoint, *, methods: list[str]) -> None:
        super().__init__(path, endpoint, methods=methods)
        pattern = self.path_regex.pattern
        assert pattern.endswith("$")
        self.path_regex = re.compile(pattern.removesuffix("$") + r"\Z", re.DOTALL)


def mounted(operations: Iterable[Operation]) -> list[ExactRoute]:
    """Returns one route per path. So a reply with status 405 names all methods of the path."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = operation.endpoint
    return [ExactRoute(path, _by_method(methods), methods=list(methods)) for path, methods in paths.items()]


def _by_method(endpoints: Mapping[str, Endpoint]) -> Endpoint:
    @wraps(next(iter(endpoints.values())))
    async def chosen(request: Request) -> ASGIApp:
        endpoint = endpoints["GET" if request.method == "HEAD" else request.method]
        request.scope["endpoint"] = endpoint  # its name is used for the route in metrics and logs
        return await endpoint(request)

    return chosen
