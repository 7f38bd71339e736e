"""Tokenizes prompts and conversations. Long ones run in a thread, until the call's deadline or its caller's
disconnect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.types import Receive

from cluster.errors import ServiceError
from cluster.text import BaseText, TextError, TextTooLong
from gateway.api.schema import InvokeRequest
from gateway.calls.parameters import check_ids, context_exceeded
from gateway.catalog.threads import LeavableThreads
from gateway.http.connected import while_connected
from gateway.http.errors import invalid

T = TypeVar("T")

INLINE_CHARACTERS = 4096
"""Maximum characters that are tokenized on the event loop. A longer text would delay other requests, so it goes into a
thread."""
MESSAGE_CHARACTERS = 16
"""Number of characters that a template is assumed to add to each message."""


class Source(Protocol):
    """Text of a call that is to be tokenized."""

    @property
    def field(self) -> str:
        """Returns the name of the request's field."""

    @property
    def characters(self) -> int: ...

    def encode(self, text: BaseText, limit: int | None, keep: int | None) -> list[list[int]]:
        """Returns the token ids of each prompt, at most the last `keep` ones.

        Raises TextError; TextTooLong if a prompt certainly has more than `limit` tokens.
        """

    def with_special(self, special: bool) -> Source:
        """Returns the text with or without the tokenizer's special tokens around it."""


class Prompts(msgspec.Struct, frozen=True):
    """Prompts of a call: each is a text, or token ids that were checked against the vocabulary."""

    prompts: Sequence[str | list[int]]
    field: str = "prompt"
    special: bool = True

    @property
    def characters(self) -> int:
        return sum(map(len, self.prompts))

    def encode(self, text: BaseText, limit: int | None, keep: int | None) -> list[list[int]]:
        return [
            text.encode_prompt(prompt, limit, keep, special=self.special)
            if isinstance(prompt, str)
            else _last(prompt, keep)
            for prompt in self.prompts
        ]

    def with_special(self, special: bool) -> Prompts:
        return msgspec.structs.replace(self, special=special)

    def texts(self, text: BaseText, encoded: list[list[int]], *, truncated: bool, skip_special: bool) -> list[str]:
        """Returns the prompts' texts for an echo. Token ids and truncated prompts are decoded; other texts are
        unchanged."""
        return [
            prompt
            if isinstance(prompt, str) and not truncated
            else text.tokenizer.decode(ids, skip_special_tokens=skip_special)
            for prompt, ids in zip(self.prompts, encoded, strict=True)
        ]


def prompts_of(stated: Sequence[str | int | list[int]] | str, vocab_size: int) -> Prompts:
    """Returns the prompts in one text, one list of token ids, or a list of either.

    Raises ServiceError for a mixture, and for token ids outside the vocabulary.
    """
    if isinstance(stated, str):
        return Prompts([stated])
    kinds = {type(prompt) for prompt in stated}
    if len(kinds) != 1:
        raise invalid("prompt", "prompt has texts and token ids; send texts, token ids, or lists of token ids")
    lists = [[token for token in stated if isinstance(token, int)]] if kinds == {int} else stated
    prompts = [prompt for prompt in lists if not isinstance(prompt, int)]
    for prompt in prompts:
        if isinstance(prompt, list):
            check_ids(prompt, vocab_size, "prompt")
    return Prompts(prompts)


def _last(ids: list[int], keep: int | None) -> list[int]:
    return ids if keep is None else ids[-keep:]


class Conversation(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    field: str = "messages"
    answer: bool = True
    """True if the assistant's turn is opened at the end."""
    continues: bool = False
    """True if the text ends after the last message's content, which the answer continues."""
    variables: dict[str, Any] = {}
    """Further values for the chat template, such as `tools`."""
    special: bool = False

    @property
    def characters(self) -> int:
        texts = sum(len(message.get("content") or "") + MESSAGE_CHARACTERS for message in self.messages)
        more = [self.variables, *(message.get("tool_calls") for message in self.messages)]
        return texts + sum(len(msgspec.json.encode(each)) for each in more if each)

    def encode(self, text: BaseText, limit: int | None, keep: int | None) -> list[list[int]]:
        return [_last(self.token_ids(text, limit, special=self.special), keep)]

    def token_ids(self, text: BaseText, limit: int | None = None, *, special: bool = False) -> list[int]:
        """Returns the token ids, as BaseText.encode_chat does."""
        return text.encode_chat(
            self.messages,
            limit,
            answer=self.answer,
            continues=self.continues,
            special=special,
            variables=self.variables,
        )

    def with_special(self, special: bool) -> Conversation:
        return msgspec.structs.replace(self, special=special)


class RenderedConversation(msgspec.Struct, frozen=True):
    """Conversation that the function's own chat template has rendered to text."""

    text: str
    field: str = "messages"
    special: bool = False

    @property
    def characters(self) -> int:
        return len(self.text)

    def encode(self, text: BaseText, limit: int | None, keep: int | None) -> list[list[int]]:
        return [_last(text.encode_rendered(self.text, limit, special=self.special), keep)]

    def with_special(self, special: bool) -> RenderedConversation:
        return msgspec.structs.replace(self, special=special)


def source_of(call: InvokeRequest, vocab_size: int) -> Source:
    """Returns the prompt or conversation of a native call. Raises ServiceError."""
    if (call.prompt is None) == (call.messages is None):
        raise invalid("prompt", "send exactly one of prompt and messages")
    if call.messages is not None:
        if call.echo:
            raise invalid("echo", "echo needs prompt; with messages use prompt_logprobs")
        return Conversation(msgspec.to_builtins(call.messages))
    assert call.prompt is not None
    return prompts_of(call.prompt, vocab_size)


async def tokens_of(
    source: Source,
    text: BaseText,
    threads: LeavableThreads,
    context: int,
    deadline: float,
    receive: Receive,
    keep: int | None = None,
) -> list[list[int]]:
    """Returns the token ids of each prompt.

    `deadline`: monotonic seconds. `receive` must have returned the whole body. `keep`: maximum tokens of each prompt.
    Raises ClientGone, and ServiceError: `validation_failed` if a prompt is too long or can't be tokenized, `timeout`.
    """

    def encode() -> list[list[int]]:
        try:
            return source.encode(text, context if keep is None else None, keep)
        except TextTooLong as error:
            raise context_exceeded(source.field, context, source.field) from error

    return await run_on_text(
        encode, size=source.characters, field=source.field, threads=threads, deadline=deadline, receive=receive
    )


async def run_on_text(
    work: Callable[[], T], *, size: int, field: str, threads: LeavableThreads, deadline: float, receive: Receive
) -> T:
    """Returns the result of `work`, which runs in a thread if its text is long.

    `size`: of the text in characters or tokens. `deadline`: monotonic seconds. Raises ClientGone, the exceptions of
    `work`, and ServiceError: `validation_failed` with `field` for a TextError, `timeout`.
    """
    try:
        if size <= INLINE_CHARACTERS:
            return work()
        async with asyncio.timeout(deadline - time.monotonic()):
            return await while_connected(threads.run(work), receive)
    except TimeoutError:
        raise ServiceError("timeout", "the timeout passed before the prompt was tokenised") from None
    except TextError as error:
        raise invalid(field, str(error)) from error
