"""An engine that does what a test says: it speaks node_agent.ipc on a real Unix socket and owns no model."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from cluster.frames import Frames
from cluster.messages import ColdStart, GenerateRequest
from node_agent.ipc import Admitted, Cancel, Command, EngineEvent, Finished, Generated, Ready, Stats, Submit, encode

_command_decoder = msgspec.msgpack.Decoder(list[Command])

READY = Ready(
    base="fingerprint",
    device="cpu",
    dtype="float32",
    max_context=512,
    kv_blocks=64,
    block_tokens=16,
    adapter_bytes=1 << 20,
    max_rows=8,
)
NO_COLD_START = ColdStart(state="none", plan="none", load=0.0, exposed=0.0)


class ScriptedEngine:
    """One connection to an API process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._frames = Frames()
        self._commands: list[Command] = []

    @classmethod
    async def connect(cls, path: Path, ready: Ready | None = READY) -> ScriptedEngine:
        engine = cls(*await asyncio.open_unix_connection(str(path)))
        if ready is not None:
            await engine.say(ready)
        return engine

    async def say(self, *events: EngineEvent) -> None:
        """One frame."""
        self.writer.write(encode(list(events)))
        await self.writer.drain()

    async def hear(self) -> Command:
        """The next command."""
        while not self._commands:
            chunk = await self._reader.read(1 << 16)
            assert chunk, "the API process hung up"
            for body in self._frames.feed(chunk):
                self._commands += _command_decoder.decode(body)
        return self._commands.pop(0)

    async def hear_submit(self) -> GenerateRequest:
        command = await self.hear()
        assert isinstance(command, Submit), command
        return command.request

    async def hear_cancel(self) -> Cancel:
        command = await self.hear()
        assert isinstance(command, Cancel), command
        return command

    async def hung_up(self) -> bool:
        """Waits for the end of the connection; what is still to be heard is dropped."""
        while await self._reader.read(1 << 16):
            pass
        return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):  # the API process may have been first
            await self.writer.wait_closed()


def admitted(id: str, state: str = "none") -> Admitted:
    return Admitted(id, state)


def tokens(id: str, token_ids: list[int]) -> list[Generated]:
    return [Generated(id, token_id) for token_id in token_ids]


def finished(id: str, reason: str = "length", **fields: Any) -> Finished:
    return Finished(id, reason, queue=0.25, prefill=0.5, cold_start=NO_COLD_START, **fields)


def stats(**fields: object) -> Stats:
    values: dict[str, object] = {
        "running": 0,
        "queued": 0,
        "kv_blocks_free": 60,
        "adapter_bytes_free": 1 << 19,
        "batch_ranks": [],
        "batch_contexts": [],
        "residents": [],
    }
    return Stats(**{**values, **fields})
