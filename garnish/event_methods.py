"""What both clients do about asynchronous calls."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from garnish import events
from garnish.protocol import Call, Prompt
from gateway.events.messages import EventList, EventReply, RedriveReply

Reply = TypeVar("Reply")


class _Asks(Protocol):
    def ask(self, call: Call, kind: type[Reply]) -> Reply: ...


class _AsksLater(Protocol):
    async def ask(self, call: Call, kind: type[Reply]) -> Reply: ...


class EventMethods:
    """Of `Client`."""

    def submit(self: _Asks, name: str, prompt: Prompt, **options: Any) -> EventReply:
        """Call a function without waiting for it; the reply's `id` is what the other methods want.

        `options` are those of `invoke`, `on_success` and `on_failure` ({"webhook": URL} or {"function": NAME}), and
        `idempotency_key`: the same key with the same call gives the same event.
        """
        return self.ask(events.submit_call(name, prompt, options), EventReply)

    def event(self: _Asks, event_id: str) -> EventReply:
        """Returns its state, attempts and, once it has succeeded, its result."""
        return self.ask(events.event_call(event_id), EventReply)

    def events(
        self: _Asks, function: str | None = None, state: str | None = None, limit: int = 20, after: str | None = None
    ) -> EventList:
        """A page of the tenant's asynchronous calls; `next` of the reply is `after` of the next page."""
        return self.ask(events.events_call(function, state, limit, after), EventList)

    def cancel(self: _Asks, event_id: str) -> EventReply:
        return self.ask(events.cancel_call(event_id), EventReply)

    def dead_letters(self: _Asks, function: str | None = None, limit: int = 20, after: str | None = None) -> EventList:
        """A page of the calls that failed for good."""
        return self.ask(events.dead_letters_call(function, limit, after), EventList)

    def redrive(self: _Asks, event_id: str) -> EventReply:
        """Queue a dead letter again."""
        return self.ask(events.redrive_call(event_id), EventReply)

    def redrive_all(self: _Asks, function: str | None = None) -> RedriveReply:
        """Queue up to 500 dead letters again; `more` says whether there may be others."""
        return self.ask(events.redrive_all_call(function), RedriveReply)


class AsyncEventMethods:
    """Of `AsyncClient`: the same methods, awaited."""

    async def submit(self: _AsksLater, name: str, prompt: Prompt, **options: Any) -> EventReply:
        return await self.ask(events.submit_call(name, prompt, options), EventReply)

    async def event(self: _AsksLater, event_id: str) -> EventReply:
        return await self.ask(events.event_call(event_id), EventReply)

    async def events(
        self: _AsksLater,
        function: str | None = None,
        state: str | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> EventList:
        return await self.ask(events.events_call(function, state, limit, after), EventList)

    async def cancel(self: _AsksLater, event_id: str) -> EventReply:
        return await self.ask(events.cancel_call(event_id), EventReply)

    async def dead_letters(
        self: _AsksLater, function: str | None = None, limit: int = 20, after: str | None = None
    ) -> EventList:
        return await self.ask(events.dead_letters_call(function, limit, after), EventList)

    async def redrive(self: _AsksLater, event_id: str) -> EventReply:
        return await self.ask(events.redrive_call(event_id), EventReply)

    async def redrive_all(self: _AsksLater, function: str | None = None) -> RedriveReply:
        return await self.ask(events.redrive_all_call(function), RedriveReply)
