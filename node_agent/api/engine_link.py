"""The API process's end of the socket to the engine. It listens; the engine connects and sends Ready first."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Protocol

import msgspec

from cluster.frames import FrameError, Frames
from node_agent.ipc import Command, EngineEvent, Ready, encode, event_decoder

SILENCE_LIMIT = 60.0
"""Seconds of silence after which an engine counts as dead. It normally sends every 0.2 s, but a step on a busy CPU may
take longer."""
READ_SIZE = 1 << 18
WRITE_LIMIT = 64 << 20
"""Maximum bytes of commands waiting for an engine that does not read."""
MAX_PATH_BYTES = 107
"""Maximum bytes of a Unix socket's path (struct sockaddr_un)."""

log = logging.getLogger(__name__)


class LinkDown(Exception):
    """Raised when no engine is connected, or when it does not read its commands."""


class EngineListener(Protocol):
    """Receiver of the engine's messages. Its methods are called on the event loop and must not block."""

    def engine_ready(self, ready: Ready) -> None: ...

    def engine_events(self, events: list[EngineEvent]) -> None: ...

    def engine_gone(self, reason: str) -> None:
        """Called once after each engine_ready, when that engine is gone. Earlier requests get no more events."""


class EngineLink:
    """Connection to one engine at a time. A new engine replaces the previous one, whose requests fail."""

    def __init__(self, path: Path, listener: EngineListener, silence_limit: float = SILENCE_LIMIT) -> None:
        self._path = path
        self._listener = listener
        self._silence_limit = silence_limit
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._current: asyncio.Task[None] | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        """Listens on a socket in a private directory (mode 0700). Creates the directory, and replaces a leftover
        socket. Raises OSError on failure."""
        if len(os.fsencode(self._path)) > MAX_PATH_BYTES:
            raise OSError(f"{self._path}: a socket's path has at most {MAX_PATH_BYTES} bytes; use a shorter directory")
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.parent.chmod(0o700)
        self._path.unlink(missing_ok=True)  # left by a killed process
        self._server = await asyncio.start_unix_server(self._serve, path=str(self._path))

    async def stop(self) -> None:
        """Stops listening and closes all connections."""
        self._stopped = True
        if self._server is not None:
            self._server.close()
        for task in self._conversations:
            task.cancel()
        if self._conversations:
            await asyncio.wait(self._conversations)
        self._path.unlink(missing_ok=True)

    def send(self, command: Command) -> None:
        """Queues one command. Raises LinkDown when no engine can take it."""
        if self._writer is None or self._writer.is_closing():
            raise LinkDown("no engine is connected")
        if self._writer.transport.get_write_buffer_size() > WRITE_LIMIT:
            raise LinkDown("the engine does not read its commands")
        self._writer.write(encode([command]))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            reason = await self._converse(reader, writer)
        except (FrameError, msgspec.DecodeError, UnexpectedMessage) as error:
            reason = f"the engine broke the protocol: {error}"
        except TimeoutError:
            reason = f"the engine sent nothing for {self._silence_limit:g} s"
        except OSError as error:
            reason = f"the connection to the engine broke: {error}"
        except asyncio.CancelledError:
            reason = "the connection to the engine was replaced or closed"
        except Exception:
            log.exception("an engine's message can't be processed")
            reason = "an engine's message can't be processed"
        finally:
            writer.close()
            self._conversations.discard(task)
        if self._writer is writer:
            self._writer = self._current = None
            log.log(logging.INFO if self._stopped else logging.WARNING, "engine gone", extra={"reason": reason})
            self._listener.engine_gone(reason)
        else:
            log.warning("a connection ended before its engine was ready", extra={"reason": reason})

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Passes on the engine's messages until it disconnects. Returns the reason."""
        frames = Frames()
        while True:
            async with asyncio.timeout(self._silence_limit):
                chunk = await reader.read(READ_SIZE)
            if not chunk:
                return "the engine's connection ended"
            for body in frames.feed(chunk):
                events = event_decoder.decode(body)
                if self._writer is not writer:
                    events = await self._welcome(events, writer)
                if events:
                    self._listener.engine_events(events)

    async def _welcome(self, events: list[EngineEvent], writer: asyncio.StreamWriter) -> list[EngineEvent]:
        """Takes Ready from a connection's first message, then replaces the previous engine. Returns the other
        events."""
        first = events[0] if events else None
        if not isinstance(first, Ready):
            raise UnexpectedMessage("the first message must be ready")
        while self._current is not None:  # repeat if another engine was faster meanwhile
            self._current.cancel()
            await asyncio.wait([self._current])
        self._current, self._writer = asyncio.current_task(), writer
        log.info("engine ready")
        self._listener.engine_ready(first)
        return events[1:]


class UnexpectedMessage(ValueError):
    """Raised for a message that is not allowed at this point."""
