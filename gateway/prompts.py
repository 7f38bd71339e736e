"""Prompts and conversations to tokens: long ones in a thread, within the call's deadline, while its caller waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.types import Receive

from cluster.errors import ServiceError
from cluster.text import BaseText, TextError, TextTooLong
from gateway.connected import while_connected
from gateway.threads import LeavableThreads

INLINE_CHARACTERS = 4096
"""Of all prompts of a call. More are tokenised in a thread, for they would hold up other requests."""
MESSAGE_CHARACTERS = 16
"""What a template may put around each message, however empty."""


class Source(Protocol):
    """What a call wants tokens of."""

    @property
    def field(self) -> str:
        """How the caller calls it."""

    @property
    def characters(self) -> int: ...

    def encode(self, text: BaseText, limit: int) -> list[list[int]]:
        """Token ids of each prompt. Raises TextError; TextTooLong when one certainly has more than `limit`."""


class Prompts(msgspec.Struct, frozen=True):
    texts: list[str]
    field: str = "prompt"

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))

    def encode(self, text: BaseText, limit: int) -> list[list[int]]:
        return [text.encode_prompt(prompt, limit) for prompt in self.texts]


class Conversation(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    field: str = "messages"

    @property
    def characters(self) -> int:
        return sum(len(message["content"]) + MESSAGE_CHARACTERS for message in self.messages)

    def encode(self, text: BaseText, limit: int) -> list[list[int]]:
        return [text.encode_chat(self.messages, limit)]


async def tokens_of(
    source: Source, text: BaseText, threads: LeavableThreads, context: int, deadline: float, receive: Receive
) -> list[list[int]]:
    """`deadline` in monotonic seconds; `receive` must have given the whole body.

    Raises ServiceError: `validation_failed` when a prompt is too long or can't be tokenised, `timeout`; ClientGone.
    """

    def encode() -> list[list[int]]:
        return source.encode(text, context)

    try:
        if source.characters <= INLINE_CHARACTERS:
            return encode()
        return await _in_thread(threads, encode, deadline, receive)
    except TextTooLong as error:
        raise ServiceError(
            "validation_failed",
            f"the prompt is too long: prompt and output together may have {context} tokens",
            param=source.field,
        ) from error
    except TextError as error:
        raise ServiceError("validation_failed", str(error), param=source.field) from error


async def _in_thread(
    threads: LeavableThreads, encode: Callable[[], list[list[int]]], deadline: float, receive: Receive
) -> list[list[int]]:
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await while_connected(threads.run(encode), receive)
    except TimeoutError:
        raise ServiceError("timeout", "the timeout passed before the prompt was tokenised") from None
