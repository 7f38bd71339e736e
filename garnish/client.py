"""The Python client: `Client` and its async twin `AsyncClient`. They move bytes; `garnish.protocol` does the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, overload

import httpx

from garnish.connection import Connection, find_connection
from garnish.hub import is_hub_place, local_folder
from garnish.methods import Methods
from garnish.protocol import (
    Call,
    Event,
    EventReader,
    Prompt,
    base_headers,
    delete_call,
    delete_version_call,
    deploy_call,
    error_of,
    invoke_call,
    parse,
)
from garnish.transport_errors import explained
from gateway.api.schema import InvokeReply
from gateway.routes.deploy import DeployReply

Reply = TypeVar("Reply")
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)


class _Connected(Methods, Generic[Http]):
    """What both clients have in common: the connection, and most of their methods."""

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
    """Calls a Garnish service. Use it as a context manager, or `close` it. Every method raises GarnishError.

    Without `url` and `key` it takes GARNISH_URL and GARNISH_API_KEY, else `./.garnish/credentials.toml`, else
    `~/.config/garnish/config.toml`.
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

        `options` are the request's other fields (docs/guide/invoke.md): max_tokens, temperature, n, stop, logit_bias,
        ...; and `session`: calls with equal ones are on the same side of an alias that splits its calls.
        With `stream` it yields TokenEvent after TokenEvent and at last one DoneEvent; closing the iterator cancels.
        """
        call = invoke_call(name, prompt, stream, options)
        return self._events(call) if stream else self.ask(call, InvokeReply)

    def deploy(
        self, name: str, adapter: str | Path, alias: str | None = None, dry_run: bool = False, *, warm: bool = False
    ) -> DeployReply:
        """Deploys a PEFT adapter's directory, `hf:org/name`, or what lies in an allowed `s3://bucket/prefix`, and
        returns what the service says of it. Raises GarnishError.

        `alias`: it points to the new version from now on. `dry_run`: the adapter is only validated. `warm`: the alias,
        or a first version, waits until a node has loaded the adapter; the reply's `warnings` say when that took too
        long.
        """
        with deploy_call(name, adapter, alias, dry_run, warm) as call:
            return self.ask(call, DeployReply)

    def delete(self, name: str, force: bool = False) -> None:
        """Deletes a function: new calls answer `not_found` at once; running ones finish, or are cancelled with
        `force`."""
        self.send(delete_call(name, force))

    def delete_version(self, name: str, version: int) -> None:
        """Deletes a version that no alias points to."""
        self.send(delete_version_call(name, version))

    def send(self, call: Call) -> None:
        """Sends a request whose reply is empty."""
        with explained(self._connection.url):
            response = self._http.request(**call.arguments())
        if response.is_error:
            raise error_of(response, self._connection)

    def ask(self, call: Call, kind: type[Reply]) -> Reply:
        """Sends any other request, such as those of garnish.operate, and returns its reply; `kind` is the reply's
        type."""
        with explained(self._connection.url):
            response = self._http.request(**call.arguments())
        return parse(response, kind, self._connection)

    def download(self, call: Call) -> Iterator[bytes]:
        """Yields a file's content as it comes; `call` is a request such as garnish.batches.content_call returns."""
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
                event = reader.line(line)
                if event is not None:
                    yield event
        reader.end()


class AsyncClient(_Connected[httpx.AsyncClient]):
    """The async twin of `Client`: the same methods, awaited; `invoke(..., stream=True)` gives an async iterator."""

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
                    event = reader.line(line)
                    if event is not None:
                        yield event
        reader.end()
