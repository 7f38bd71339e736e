"""The Python client: `Client` and its asynchronous counterpart `AsyncClient`.

This module does the I/O; `calls` and `protocol` build requests and parse replies.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import httpx

from garnish import calls
from garnish.calls import Prompt, deploy_call, invoke_call
from garnish.credentials import Connection, find_connection
from garnish.errors import GarnishError
from garnish.hub import is_hub_place, local_folder
from garnish.protocol import Call, Event, EventReader, base_headers, error_of, parse
from gateway.api.schema import InvokeReply
from gateway.events.messages import EventList, EventReply, RedriveReply
from gateway.residency.messages import ForecastReply, WarmReply
from gateway.routes.aliases import AliasReply
from gateway.routes.deploy import DeployReply
from gateway.routes.functions import FunctionList, FunctionReply, VersionList
from gateway.routes.usage import UsageReply

Parameters = ParamSpec("Parameters")
Reply = TypeVar("Reply")
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Converts httpx's errors into GarnishError, which says what failed at `url` and what to do."""
    try:
        yield
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        problem = f"not a service's address: {url!r} (expected one such as http://127.0.0.1:8080)"
        raise GarnishError("unreachable", problem) from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if isinstance(error.__context__, ssl.SSLError) or "SSL" in str(error):
            problem = f"{url} can't be reached by TLS: {error}; does it speak http, without s?"
        else:
            problem = (
                f"nothing answers at {url}: is it started? garnish up (or name another address: --url, GARNISH_URL)"
            )
        raise GarnishError("unreachable", problem) from error
    except httpx.TimeoutException as error:
        raise GarnishError("unreachable", f"{url} did not answer in time ({type(error).__name__})") from error
    except httpx.RemoteProtocolError as error:
        problem = f"the connection to {url} broke off, or no Garnish service answers there: {error}"
        raise GarnishError("unreachable", problem) from error
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise GarnishError("unreachable", f"{url} can't be reached: {reason}") from error


class Method(Generic[Parameters, Reply]):
    """Descriptor of a client's method that sends the request built by `request` and returns the reply.

    The method has the parameters of `request`. `kind` is the type of the reply.
    """

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


def _as_is(call: Call) -> Call:
    """Sends the request `call`, whose reply is empty."""
    return call


class Methods:
    """Methods of both clients that send one request. Each is documented by its function in garnish.calls."""

    send = Method(_as_is, NoneType)
    functions = Method(calls.functions_call, FunctionList)
    function = Method(calls.function_call, FunctionReply)
    versions = Method(calls.versions_call, VersionList)
    delete = Method(calls.delete_call, NoneType)
    delete_version = Method(calls.delete_version_call, NoneType)
    alias = Method(calls.alias_call, AliasReply)
    set_alias = Method(calls.set_alias_call, AliasReply)
    roll_back = Method(calls.rollback_call, AliasReply)
    warm = Method(calls.warm_call, WarmReply)
    forecast = Method(calls.forecast_call, ForecastReply)
    set_policy = Method(calls.policy_call, FunctionReply)
    usage = Method(calls.usage_call, UsageReply)
    tenant = Method(calls.tenant_call, dict[str, Any])
    put_tenant = Method(calls.put_tenant_call, dict[str, Any])
    submit = Method(calls.submit_call, EventReply)
    event = Method(calls.event_call, EventReply)
    events = Method(calls.events_call, EventList)
    cancel = Method(calls.cancel_call, EventReply)
    dead_letters = Method(calls.dead_letters_call, EventList)
    redrive = Method(calls.redrive_call, EventReply)
    redrive_all = Method(calls.redrive_all_call, RedriveReply)


class _Connected(Methods, Generic[Http]):
    """Base class of both clients, with the connection and most methods."""

    _http_kind: type[Http]
    _http: Http

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        tenant: str | None = None,
        connection: Connection | None = None,
    ) -> None:
        self._connection = connection or find_connection(url, key, os.environ, tenant=tenant)
        with explained(self._connection.url):
            self._http = self._http_kind(base_url=self._connection.url, headers=base_headers(self._connection))


class Client(_Connected[httpx.Client]):
    """Synchronous client of a Garnish service. All methods raise GarnishError.

    Use it as a context manager, or call `close`. `url` and `key` default to GARNISH_URL and GARNISH_API_KEY, then to
    `./.garnish/credentials.toml`, then to `~/.config/garnish/config.toml`.
    """

    _http_kind = httpx.Client

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @overload
    def invoke(self, name: str, prompt: Prompt, *, stream: Literal[False] = False, **options: Any) -> InvokeReply: ...

    @overload
    def invoke(self, name: str, prompt: Prompt, *, stream: Literal[True], **options: Any) -> Iterator[Event]: ...

    def invoke(
        self, name: str, prompt: Prompt, *, stream: bool = False, **options: Any
    ) -> InvokeReply | Iterator[Event]:
        """Calls a function (`name`, `name:alias` or `name:version`) with a prompt, its token ids, or messages.

        `options` are the request's other fields (docs/guide/invoke.md), such as max_tokens, temperature and stop, and
        `session`. Where an alias splits its calls between versions, calls with equal `session` get the same version.
        With `stream` it returns an iterator that yields TokenEvents and finally one DoneEvent. Closing the iterator
        cancels the call.
        """
        call = invoke_call(name, prompt, stream, options)
        return self._events(call) if stream else self.ask(call, InvokeReply)

    def deploy(
        self, name: str, adapter: str | Path, alias: str | None = None, dry_run: bool = False, *, warm: bool = False
    ) -> DeployReply:
        """Deploys a PEFT adapter from a directory, `hf:org/name`, or an allowed `s3://bucket/prefix`.

        `alias` is pointed to the new version. With `dry_run` the adapter is only validated. With `warm` the alias
        changes only after a node has loaded the adapter; a function's first version waits likewise. The reply's
        `warnings` say if that took too long. Raises GarnishError.
        """
        with deploy_call(name, adapter, alias, dry_run, warm) as call:
            return self.ask(call, DeployReply)

    def ask(self, call: Call, kind: type[Reply]) -> Reply:
        """Sends a request, such as those of garnish.calls, and returns its reply as `kind`."""
        with explained(self._connection.url):
            response = self._http.request(**call.arguments())
        return parse(response, kind, self._connection)

    def download(self, call: Call) -> Iterator[bytes]:
        """Yields a file's content in chunks as they arrive. `call` is a request such as garnish.calls.content_call."""
        with explained(self._connection.url), self._http.stream(**call.arguments()) as response:
            if response.is_error:
                response.read()
                raise error_of(response, self._connection)
            yield from response.iter_bytes()

    def _events(self, call: Call) -> Iterator[Event]:
        reader = EventReader()
        with explained(self._connection.url), self._http.stream(**call.arguments()) as response:
            if response.is_error:
                response.read()
                raise error_of(response, self._connection)
            for line in response.iter_lines():
                event = reader.feed_line(line)
                if event is not None:
                    yield event
        reader.end()


class AsyncClient(_Connected[httpx.AsyncClient]):
    """Asynchronous counterpart of `Client`, with the same methods as coroutines.

    `invoke(..., stream=True)` returns an asynchronous iterator.
    """

    _http_kind = httpx.AsyncClient

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    @overload
    async def invoke(
        self, name: str, prompt: Prompt, *, stream: Literal[False] = False, **options: Any
    ) -> InvokeReply: ...

    @overload
    async def invoke(
        self, name: str, prompt: Prompt, *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[Event]: ...

    async def invoke(
        self, name: str, prompt: Prompt, *, stream: bool = False, **options: Any
    ) -> InvokeReply | AsyncIterator[Event]:
        """Does what `Client.invoke` does, asynchronously."""
        call = invoke_call(name, prompt, stream, options)
        return self._events(call) if stream else await self.ask(call, InvokeReply)

    async def deploy(
        self, name: str, adapter: str | Path, alias: str | None = None, dry_run: bool = False, *, warm: bool = False
    ) -> DeployReply:
        """Does what `Client.deploy` does, asynchronously."""
        if is_hub_place(adapter):
            adapter = await asyncio.to_thread(local_folder, adapter, f"garnish deploy {name} {{}}")
        with deploy_call(name, adapter, alias, dry_run, warm) as call:
            return await self.ask(call, DeployReply)

    async def ask(self, call: Call, kind: type[Reply]) -> Reply:
        """Does what `Client.ask` does, asynchronously."""
        with explained(self._connection.url):
            response = await self._http.request(**call.arguments())
        return parse(response, kind, self._connection)

    async def download(self, call: Call) -> AsyncIterator[bytes]:
        """Does what `Client.download` does, asynchronously."""
        with explained(self._connection.url):
            async with self._http.stream(**call.arguments()) as response:
                if response.is_error:
                    await response.aread()
                    raise error_of(response, self._connection)
                async for piece in response.aiter_bytes():
                    yield piece

    async def _events(self, call: Call) -> AsyncIterator[Event]:
        reader = EventReader()
        with explained(self._connection.url):
            async with self._http.stream(**call.arguments()) as response:
                if response.is_error:
                    await response.aread()
                    raise error_of(response, self._connection)
                async for line in response.aiter_lines():
                    event = reader.feed_line(line)
                    if event is not None:
                        yield event
        reader.end()


def admin_client(state: Path) -> Client:
    """Returns a client for the service that the state directory belongs to, with its admin key."""
    return Client(connection=find_connection(None, None, os.environ, state=state, admin=True))
