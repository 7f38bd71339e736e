"""The Python client: `Client` and its async twin `AsyncClient`. They move bytes; `garnish.protocol` does the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import httpx

from garnish.connection import Connection, find_connection
from garnish.event_methods import AsyncEventMethods, EventMethods
from garnish.hub import is_hub_place, local_folder
from garnish.protocol import (
    AliasTarget,
    Call,
    Event,
    EventReader,
    Prompt,
    alias_call,
    base_headers,
    delete_call,
    delete_version_call,
    deploy_call,
    error_of,
    forecast_call,
    function_call,
    functions_call,
    invoke_call,
    parse,
    policy_call,
    put_tenant_call,
    rollback_call,
    set_alias_call,
    tenant_call,
    usage_call,
    versions_call,
    warm_call,
)
from garnish.transport_errors import explained
from gateway.api.schema import InvokeReply
from gateway.residency.messages import ForecastReply, Tier, WarmReply
from gateway.routes.aliases import AliasReply
from gateway.routes.deploy import DeployReply
from gateway.routes.functions import FunctionList, FunctionReply, VersionList
from gateway.routes.usage import UsageReply

Reply = TypeVar("Reply")


class Client(EventMethods):
    """Calls a Garnish service. Use it as a context manager, or `close` it. Every method raises GarnishError.

    Without `url` and `key` it takes GARNISH_URL and GARNISH_API_KEY, else `./.garnish/credentials.toml`, else
    `~/.config/garnish/config.toml`.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        tenant: str | None = None,
        connection: Connection | None = None,
    ) -> None:
        found = connection or find_connection(url, key, os.environ, tenant=tenant)
        self._connection = found
        with explained(self._connection.url):
            self._http = httpx.Client(base_url=found.url, headers=base_headers(found))

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
        """Call a function (`name`, `name:alias` or `name:version`) with a prompt, its token ids, or messages.

        `options` are the request's other fields (docs/guide/invoke.md): max_tokens, temperature, n, stop, logit_bias,
        ...; and `session`: calls with equal ones are on the same side of an alias that splits its calls.
        With `stream` it yields TokenEvent after TokenEvent and at last one DoneEvent; closing the iterator cancels.
        """
        call = invoke_call(name, prompt, stream, options)
        return self._events(call) if stream else self._reply(call, InvokeReply)

    def deploy(
        self, name: str, adapter: str | Path, alias: str | None = None, dry_run: bool = False, *, warm: bool = False
    ) -> DeployReply:
        """Deploy a PEFT adapter's directory, `hf:org/name`, or what lies in an allowed `s3://bucket/prefix`.

        With `dry_run` it is only validated. `warm`, here and below: a node has it before calls come; the reply's
        `warnings` say when that took too long.
        """
        with deploy_call(name, adapter, alias, dry_run, warm) as call:
            return self._reply(call, DeployReply)

    def functions(self, limit: int = 100, after: str | None = None) -> FunctionList:
        """A page of the tenant's functions; `next` of the reply is `after` of the next page."""
        return self._reply(functions_call(limit, after), FunctionList)

    def function(self, name: str) -> FunctionReply:
        return self._reply(function_call(name), FunctionReply)

    def alias(self, name: str, alias: str) -> AliasReply:
        """Returns where an alias points, and where it pointed before."""
        return self._reply(alias_call(name, alias), AliasReply)

    def set_alias(
        self, name: str, alias: str, target: AliasTarget, if_match: int | None = None, *, warm: bool = False
    ) -> AliasReply:
        """Point an alias to a version, or to several: `{3: 0.9, 4: 0.1}`.

        `if_match`, here and below: the `generation` of a reply; `precondition_failed` when the function has changed.
        """
        return self._reply(set_alias_call(name, alias, target, if_match, warm), AliasReply)

    def roll_back(
        self, name: str, alias: str = "latest", if_match: int | None = None, *, warm: bool = False
    ) -> AliasReply:
        """Point an alias to what it pointed to before; again: one further back."""
        return self._reply(rollback_call(name, alias, if_match, warm), AliasReply)

    def warm(self, name: str, version: str | None = None, *, tier: Tier = "device", copies: int = 1) -> WarmReply:
        """Bring what calls of the function would run (or a version, or an alias's) to its nodes now. Loads may still go
        on when it returns: the reply says where each is, and the same call again where it is then."""
        return self._reply(warm_call(name, version, tier, copies), WarmReply)

    def forecast(self, name: str) -> ForecastReply:
        """Returns whether calls of the function are expected soon, and which nodes are asked to have it ready."""
        return self._reply(forecast_call(name), ForecastReply)

    def set_policy(self, name: str, policy: Mapping[str, Any], if_match: int | None = None) -> FunctionReply:
        """Change the stated fields of a function's policy; None takes one back."""
        return self._reply(policy_call(name, policy, if_match), FunctionReply)

    def delete(self, name: str, force: bool = False) -> None:
        """New calls answer `not_found` at once; running ones finish, or are cancelled with `force`."""
        self.send(delete_call(name, force))

    def delete_version(self, name: str, version: int) -> None:
        """A version that no alias points to."""
        self.send(delete_version_call(name, version))

    def send(self, call: Call) -> None:
        """A request whose reply is empty."""
        with explained(self._connection.url):
            response = self._http.request(**call.arguments())
        if response.is_error:
            raise error_of(response, self._connection)

    def ask(self, call: Call, kind: type[Reply]) -> Reply:
        """Any other request, such as those of garnish.operate; `kind` is the type of its reply."""
        return self._reply(call, kind)

    def download(self, call: Call) -> Iterator[bytes]:
        """A file's content as it comes, such as that of garnish.batches.content_call."""
        with explained(self._connection.url), self._http.stream(**call.arguments()) as response:
            if response.is_error:
                response.read()
                raise error_of(response, self._connection)
            yield from response.iter_bytes()

    def usage(
        self,
        tenant: str | None = None,
        start: str | None = None,
        end: str | None = None,
        group_by: Sequence[str] | None = None,
    ) -> UsageReply:
        """Sums of what was used from `start` to `end` (ISO 8601 or Unix time; by default the last 24 hours).

        `group_by`: of tenant, function, version, hour. With an admin key `tenant` says whose; None: of all.
        """
        return self._reply(usage_call(tenant, start, end, group_by), UsageReply)

    def versions(self, name: str) -> VersionList:
        """The manifests of all versions of a function."""
        return self._reply(versions_call(name), VersionList)

    def tenant(self, tenant: str) -> dict[str, Any]:
        """Its SLO, limits, weight and keys; needs an admin key."""
        return self._reply(tenant_call(tenant), dict[str, Any])

    def put_tenant(self, tenant: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Make a tenant, or give it these settings; needs an admin key."""
        return self._reply(put_tenant_call(tenant, settings), dict[str, Any])

    def _reply(self, call: Call, kind: type[Reply]) -> Reply:
        with explained(self._connection.url):
            response = self._http.request(**call.arguments())
        return parse(response, kind, self._connection)

    def _events(self, call: Call) -> Iterator[Event]:
        reader = EventReader()
        with explained(self._connection.url), self._http.stream(**call.arguments()) as response:
            if response.is_error:
                response.read()
                raise error_of(response, self._connection)
            for line in response.iter_lines():
                event = reader.line(line)
                if event is not None:
                    yield event
        reader.end()


class AsyncClient(AsyncEventMethods):
    """The async twin of `Client`: the same methods, awaited; `invoke(..., stream=True)` gives an async iterator."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        tenant: str | None = None,
        connection: Connection | None = None,
    ) -> None:
        found = connection or find_connection(url, key, os.environ, tenant=tenant)
        self._connection = found
        with explained(self._connection.url):
            self._http = httpx.AsyncClient(base_url=found.url, headers=base_headers(found))

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
        return self._events(call) if stream else await self._reply(call, InvokeReply)

    async def deploy(
        self, name: str, adapter: str | Path, alias: str | None = None, dry_run: bool = False, *, warm: bool = False
    ) -> DeployReply:
        """Does what `Client.deploy` does, asynchronously."""
        if is_hub_place(adapter):
            adapter = await asyncio.to_thread(local_folder, adapter, f"garnish deploy {name} {{}}")
        with deploy_call(name, adapter, alias, dry_run, warm) as call:
            return await self._reply(call, DeployReply)

    async def functions(self, limit: int = 100, after: str | None = None) -> FunctionList:
        """Does what `Client.functions` does, asynchronously."""
        return await self._reply(functions_call(limit, after), FunctionList)

    async def function(self, name: str) -> FunctionReply:
        return await self._reply(function_call(name), FunctionReply)

    async def alias(self, name: str, alias: str) -> AliasReply:
        """Does what `Client.alias` does, asynchronously."""
        return await self._reply(alias_call(name, alias), AliasReply)

    async def set_alias(
        self, name: str, alias: str, target: AliasTarget, if_match: int | None = None, *, warm: bool = False
    ) -> AliasReply:
        """Does what `Client.set_alias` does, asynchronously."""
        return await self._reply(set_alias_call(name, alias, target, if_match, warm), AliasReply)

    async def roll_back(
        self, name: str, alias: str = "latest", if_match: int | None = None, *, warm: bool = False
    ) -> AliasReply:
        """Does what `Client.roll_back` does, asynchronously."""
        return await self._reply(rollback_call(name, alias, if_match, warm), AliasReply)

    async def warm(self, name: str, version: str | None = None, *, tier: Tier = "device", copies: int = 1) -> WarmReply:
        """Does what `Client.warm` does, asynchronously."""
        return await self._reply(warm_call(name, version, tier, copies), WarmReply)

    async def forecast(self, name: str) -> ForecastReply:
        """Does what `Client.forecast` does, asynchronously."""
        return await self._reply(forecast_call(name), ForecastReply)

    async def set_policy(self, name: str, policy: Mapping[str, Any], if_match: int | None = None) -> FunctionReply:
        """Does what `Client.set_policy` does, asynchronously."""
        return await self._reply(policy_call(name, policy, if_match), FunctionReply)

    async def delete(self, name: str, force: bool = False) -> None:
        """Does what `Client.delete` does, asynchronously."""
        await self.send(delete_call(name, force))

    async def delete_version(self, name: str, version: int) -> None:
        """Does what `Client.delete_version` does, asynchronously."""
        await self.send(delete_version_call(name, version))

    async def send(self, call: Call) -> None:
        """Does what `Client.send` does, asynchronously."""
        with explained(self._connection.url):
            response = await self._http.request(**call.arguments())
        if response.is_error:
            raise error_of(response, self._connection)

    async def ask(self, call: Call, kind: type[Reply]) -> Reply:
        """Does what `Client.ask` does, asynchronously."""
        return await self._reply(call, kind)

    async def download(self, call: Call) -> AsyncIterator[bytes]:
        """Does what `Client.download` does, asynchronously."""
        with explained(self._connection.url):
            async with self._http.stream(**call.arguments()) as response:
                if response.is_error:
                    await response.aread()
                    raise error_of(response, self._connection)
                async for piece in response.aiter_bytes():
                    yield piece

    async def usage(
        self,
        tenant: str | None = None,
        start: str | None = None,
        end: str | None = None,
        group_by: Sequence[str] | None = None,
    ) -> UsageReply:
        """Does what `Client.usage` does, asynchronously."""
        return await self._reply(usage_call(tenant, start, end, group_by), UsageReply)

    async def versions(self, name: str) -> VersionList:
        """Does what `Client.versions` does, asynchronously."""
        return await self._reply(versions_call(name), VersionList)

    async def tenant(self, tenant: str) -> dict[str, Any]:
        """Does what `Client.tenant` does, asynchronously."""
        return await self._reply(tenant_call(tenant), dict[str, Any])

    async def put_tenant(self, tenant: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Does what `Client.put_tenant` does, asynchronously."""
        return await self._reply(put_tenant_call(tenant, settings), dict[str, Any])

    async def _reply(self, call: Call, kind: type[Reply]) -> Reply:
        with explained(self._connection.url):
            response = await self._http.request(**call.arguments())
        return parse(response, kind, self._connection)

    async def _events(self, call: Call) -> AsyncIterator[Event]:
        reader = EventReader()
        with explained(self._connection.url):
            async with self._http.stream(**call.arguments()) as response:
                if response.is_error:
                    await response.aread()
                    raise error_of(response, self._connection)
                async for line in response.aiter_lines():
                    event = reader.line(line)
                    if event is not None:
                        yield event
        reader.end()
