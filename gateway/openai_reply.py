"""Generations in OpenAI's shapes: whole replies and chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from cluster.errors import ServiceError
from cluster.messages import Done, Token, TokenLogprob
from gateway import openai_schema as openai
from gateway.choices import Outcome, merged
from gateway.dispatch import Generation
from gateway.errors import openai_body
from gateway.event_stream import sse

END = b"data: [DONE]\n\n"


class Head(msgspec.Struct, frozen=True):
    """What all chunks of one reply repeat. `prompts` tells how many of the generations have a prompt of their own."""

    id: str
    model: str
    chat: bool
    logprobs: bool
    include_usage: bool
    choices: int
    """Generations per prompt."""
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


def whole(head: Head, outcomes: Sequence[Outcome]) -> openai.Completion | openai.Chat:
    usage = usage_of(head, [outcome.done for outcome in outcomes])
    if head.chat:
        return openai.Chat(
            head.id, head.created, head.model, [_chat(head, *pair) for pair in enumerate(outcomes)], usage
        )
    choices = [
        openai.CompletionChoice(
            index, outcome.text, finish_reason(outcome.done), _completion_logprobs(head, outcome.logprobs, 0)
        )
        for index, outcome in enumerate(outcomes)
    ]
    return openai.Completion(head.id, head.created, head.model, choices, usage)


def _chat(head: Head, index: int, outcome: Outcome) -> openai.ChatChoice:
    message = openai.Reply(content=outcome.text)
    return openai.ChatChoice(index, message, finish_reason(outcome.done), _chat_logprobs(head, outcome.logprobs))


async def chunks(head: Head, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
    """Events of the stream, up to `[DONE]`. Raises ServiceError."""
    offsets = [0] * len(generations)
    begun: set[int] = set()
    async with aclosing(merged(generations)) as items:
        async for index, event in items:
            if head.chat and index not in begun:
                begun.add(index)
                yield _chat_chunk(head, openai.ChunkChoice(index, openai.Delta(role="assistant", content="")))
            if isinstance(event, Token):
                yield _token_chunk(head, index, event, offsets[index])
                # By the tokens, as in a whole reply: text may be held back for what comes after it.
                offsets[index] += sum(len(entry.token) for entry in event.logprobs)
            else:
                if event.text:
                    yield _token_chunk(head, index, Token(event.text, [], event.completion_tokens), offsets[index])
                yield _last_chunk(head, index, event)
    if head.include_usage:
        usage = usage_of(head, [generation.done for generation in generations if generation.done])
        kind = openai.ChatChunk if head.chat else openai.Completion
        yield sse(kind(head.id, head.created, head.model, [], usage))
    yield END


def failure(error: ServiceError, request_id: str) -> bytes:
    return sse(openai_body(error, request_id))


def finish_reason(done: Done) -> openai.FinishReason:
    """OpenAI knows no `timeout` and no `cancelled`: the text ended too early, or was ended."""
    return "stop" if done.finish_reason in ("stop", "cancelled") else "length"


def usage_of(head: Head, ends: Sequence[Done]) -> openai.TokenUsage:
    """Each prompt counts once, however many choices it has."""
    prompt = sum(done.prompt_tokens for done in ends[:: head.choices])
    completion = sum(done.completion_tokens for done in ends)
    cached = sum(done.cached_tokens for done in ends[:: head.choices])
    return openai.TokenUsage(prompt, completion, prompt + completion, openai.Details(cached))


def _token_chunk(head: Head, index: int, event: Token, offset: int) -> bytes:
    if head.chat:
        delta = openai.Delta(content=event.text)
        return _chat_chunk(head, openai.ChunkChoice(index, delta, logprobs=_chat_logprobs(head, event.logprobs)))
    logprobs = _completion_logprobs(head, event.logprobs, offset)
    return _text_chunk(head, openai.CompletionChoice(index, event.text, None, logprobs))


def _last_chunk(head: Head, index: int, done: Done) -> bytes:
    if head.chat:
        return _chat_chunk(head, openai.ChunkChoice(index, openai.Delta(), finish_reason(done)))
    return _text_chunk(head, openai.CompletionChoice(index, "", finish_reason(done)))


def _chat_chunk(head: Head, choice: openai.ChunkChoice) -> bytes:
    return sse(openai.ChatChunk(head.id, head.created, head.model, [choice]))


def _text_chunk(head: Head, choice: openai.CompletionChoice) -> bytes:
    return sse(openai.Completion(head.id, head.created, head.model, [choice]))


def _chat_logprobs(head: Head, entries: Sequence[TokenLogprob]) -> openai.ChatLogprobs | None:
    if not head.logprobs:
        return None
    return openai.ChatLogprobs(
        [
            openai.ChatLogprob(
                entry.token,
                entry.logprob,
                _bytes(entry.token),
                [openai.ChatTop(top.token, top.logprob, _bytes(top.token)) for top in entry.top],
            )
            for entry in entries
        ]
    )


def _bytes(token: str) -> list[int] | None:
    """None for a part of a character: its text stands for other bytes than the token's."""
    return None if "\ufffd" in token else list(token.encode())


def _completion_logprobs(head: Head, entries: Sequence[TokenLogprob], offset: int) -> openai.CompletionLogprobs | None:
    if not head.logprobs:
        return None
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return openai.CompletionLogprobs(
        [entry.token for entry in entries],
        [entry.logprob for entry in entries],
        [{top.token: top.logprob for top in entry.top} for entry in entries],
        offsets,
    )
