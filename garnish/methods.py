"""Methods that both clients have: what they send and the type of the reply, the same for `Client` and `AsyncClient`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from garnish import events as event_calls
from garnish import protocol
from garnish.protocol import Call
from gateway.events.messages import EventList, EventReply, RedriveReply
from gateway.residency.messages import ForecastReply, WarmReply
from gateway.routes.aliases import AliasReply
from gateway.routes.functions import FunctionList, FunctionReply, VersionList
from gateway.routes.usage import UsageReply

if TYPE_CHECKING:
    from garnish.client import AsyncClient, Client

Parameters = ParamSpec("Parameters")
Reply = TypeVar("Reply")


class Method(Generic[Parameters, Reply]):
    """A client's method with the parameters of `request`: it sends what that returns with the client's `ask`, and
    returns the reply, of the type `kind`."""

    def __init__(self, request: Callable[Parameters, Call], kind: type[Reply]) -> None:
        self._request, self._kind = request, kind
        self._signature = inspect.signature(request).replace(return_annotation=kind)

    @overload
    def __get__(self, client: Client, owner: object) -> Callable[Parameters, Reply]: ...

    @overload
    def __get__(self, client: AsyncClient, owner: object) -> Callable[Parameters, Coroutine[Any, Any, Reply]]: ...

    def __get__(self, client: Any, owner: object) -> Any:
        @wraps(self._request)
        def method(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            return client.ask(self._request(*args, **kwargs), self._kind)

        method.__signature__ = self._signature  # type: ignore[attr-defined]
        return method


class Methods:
    """The methods of both clients that take one request and its reply; the functions of the requests say more of
    each."""

    functions = Method(protocol.functions_call, FunctionList)
    function = Method(protocol.function_call, FunctionReply)
    versions = Method(protocol.versions_call, VersionList)
    alias = Method(protocol.alias_call, AliasReply)
    set_alias = Method(protocol.set_alias_call, AliasReply)
    roll_back = Method(protocol.rollback_call, AliasReply)
    warm = Method(protocol.warm_call, WarmReply)
    forecast = Method(protocol.forecast_call, ForecastReply)
    set_policy = Method(protocol.policy_call, FunctionReply)
    usage = Method(protocol.usage_call, UsageReply)
    tenant = Method(protocol.tenant_call, dict[str, Any])
    put_tenant = Method(protocol.put_tenant_call, dict[str, Any])
    submit = Method(event_calls.submit_call, EventReply)
    event = Method(event_calls.event_call, EventReply)
    events = Method(event_calls.events_call, EventList)
    cancel = Method(event_calls.cancel_call, EventReply)
    dead_letters = Method(event_calls.dead_letters_call, EventList)
    redrive = Method(event_calls.redrive_call, EventReply)
    redrive_all = Method(event_calls.redrive_all_call, RedriveReply)
